"""Training of a drafter: blocks at random places of texts that the target has continued itself.

A drafter is to say what its target will say, so most of what it learns from is the target's own text; its prompts,
which are text of the corpus, count too.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from kdtp.train.config import DrafterTrain
from kdtp.train.drafter import Drafter
from kdtp.train.loop import precision
from kdtp.train.target import Target


class DrafterJob:
    """As loop.Job. samples, held_out: texts int32 [N, seq] on the target's device, whose first train.prompt tokens are
    given; their temperatures take turns as train.temperatures."""

    def __init__(
        self, drafter: Drafter, target: Target, train: DrafterTrain, samples: Tensor, held_out: Tensor
    ) -> None:
        self.module, self._drafter, self._target, self._train = drafter, drafter, target, train
        self._samples, self._held_out, self.device = samples, held_out, samples.device
        self.tokens = train.batch * train.seq
        self._slots = drafter.config.block_size - 1
        weights = torch.exp(-torch.arange(self._slots, device=self.device) / train.decay)
        self._weights = weights / weights.sum()

    def loss(self, generator: torch.Generator) -> Tensor:
        """As loop.Job."""
        train = self._train
        rows = torch.randint(len(self._samples), (train.batch,), generator=generator)
        # Different places in each text, all of them with something to see and a whole block to foretell.
        chances = torch.rand(train.batch, train.seq - self._slots - 1, generator=generator)
        starts = 1 + chances.topk(train.anchors, -1).indices
        losses, _ = self._blocks(self._samples[rows.to(self.device)].long(), starts.to(self.device))
        return losses

    def after_step(self) -> None:
        """As loop.Job."""

    def evaluate(self) -> dict[str, float]:
        """loss; tokens per round of a chain of drafts: of all texts, and (greedy) of those at temperature 0."""
        train = self._train
        last = train.seq - self._slots - 1
        starts = torch.linspace(train.prompt - 1, last, train.anchors, device=self.device).long()
        losses, rounds = [], []
        for texts in torch.split(self._held_out, train.batch):
            loss, matched = self._blocks(texts.long(), starts.expand(len(texts), -1))
            losses.append(loss * len(texts))
            rounds.append(1 + matched.mean(-1))
        tokens = torch.cat(rounds)
        figures = {"loss": torch.stack(losses).sum() / len(self._held_out), "tokens_per_round": tokens.mean()}
        if 0.0 in train.temperatures:
            greedy = tokens[train.temperatures.index(0.0) :: len(train.temperatures)]
            figures["greedy"] = greedy.mean()
        return {name: float(value) for name, value in figures.items()}

    def _blocks(self, texts: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
        """texts int64 [S, T], starts int64 [S, A] -> the loss, and how many slots a chain has right [S, A]."""
        with precision(self.device):
            with torch.no_grad():
                _, taps = self._target.hidden(texts, self._drafter.config.target_layer_ids)
            slots = torch.arange(self._slots + 1, device=self.device)
            tokens = texts.gather(1, (starts[..., None] + slots).flatten(1)).view(*starts.shape, -1)
            features = torch.cat(taps, -1)
            hidden = self._drafter(features, starts, tokens[..., 0], self._target.embedding)[:, :, 1:]
            logits = functional.linear(hidden, self._target.head).float()
            losses = _cross_entropy(logits, tokens[..., 1:])
            if self._drafter.candidate_selector is None:
                drafted = logits.argmax(-1)
            else:
                more, drafted = self._selected(hidden, logits, tokens)
                losses = losses + more
        matched = (drafted == tokens[..., 1:]).cumprod(-1).sum(-1)
        return (losses.mean((0, 1)) * self._weights).sum(), matched.float()

    def _selected(self, hidden: Tensor, logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The selector's loss after the true predecessor, 0 where the truth is no candidate [S, A, L]; and what a chain
        drafts [S, A, L], when nothing is to be learned (else -1)."""
        selector = self._drafter.candidate_selector
        assert selector is not None
        unary, candidates = logits.topk(self._drafter.config.selector_top_k, -1)
        truth = candidates == tokens[..., 1:, None]
        scores = unary + selector(hidden, tokens[..., :-1], candidates)
        losses = _cross_entropy(scores, truth.int().argmax(-1)) * truth.any(-1)
        if torch.is_grad_enabled():
            return losses, torch.full_like(tokens[..., 1:], -1)
        before, drafted = tokens[..., 0], []
        for slot in range(self._slots):
            among = candidates[:, :, slot]
            best = (unary[:, :, slot] + selector(hidden[:, :, slot], before, among)).argmax(-1, keepdim=True)
            before = among.gather(-1, best)[..., 0]
            drafted.append(before)
        return losses, torch.stack(drafted, -1)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """[..., V] and [...] -> [...]."""
    flat = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="none")
    return flat.view(labels.shape)
