"""Drafts for scripts/bench_width.py: synthetic ones, and those of a trained drafter, recorded while it drafts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from kdtp.config import DrafterConfig, EngineConfig
from kdtp.draft.base import Ask
from kdtp.draft.dflash.drafter import DFlashDrafter
from kdtp.engine.assemble import assemble, local_link
from kdtp.engine.plan import plan
from kdtp.engine.request import Request
from kdtp.proposals import Grown, Marginals, Proposal
from kdtp.spec.tree import grow
from kdtp.types import SamplingParams

DEPTH, TOPK, WIDEST = 7, 16, 63
OFF_SPINE = 0.35  # how much less a marginal drafter knows after a token that was not its first choice


class Drafted(NamedTuple):
    """A draft of a sequence: its widest tree, and the nodes of the truth's path, as far as it has them."""

    grown: Grown
    path: list[int]

    def tokens(self, nodes: int) -> int:
        """Emitted in a round that verifies so many nodes."""
        return 1 + sum(node <= nodes for node in self.path)


@dataclass(frozen=True)
class Text:
    """A kind of text. hit: chance that the truth is among the candidates of a depth; first: that it is then the first
    choice; sure: above 1, the drafter's probabilities are sharper than the truth's."""

    name: str
    hit: float
    first: float
    sure: float = 1.0


TEXTS = (
    Text("code", 0.95, 0.85),
    Text("prose", 0.7, 0.6),
    Text("prose, too sure", 0.7, 0.6, 2.5),
    Text("not its language", 0.25, 0.4, 1.5),
    Text("noise", 0.02, 0.3, 3.0),
)


def synthetic(text: Text, rng: random.Random) -> Drafted:
    """Candidate r of each depth has the id r, and the truth is drawn depth by depth."""
    lp, truth, hit = [], [], text.hit
    for _ in range(DEPTH):
        ratio = min(0.95, max(0.05, rng.gauss(1.0 - text.first, 0.1)))
        chance = [(1.0 - ratio) * ratio**r for r in range(TOPK)]
        sharp = [c**text.sure for c in chance]
        left = text.hit * sum(chance)  # the rest of the vocabulary has what the candidates have not
        lp.append([left * s / sum(sharp) for s in sharp])
        rank = rng.choices(range(TOPK), chance)[0] if rng.random() < hit else -1
        truth.append(rank)
        hit = hit if rank == 0 else hit * OFF_SPINE
    return drafted(Marginals(torch.tensor(lp).log(), torch.arange(TOPK).expand(DEPTH, -1)), 0, truth)


def drafted(proposal: Proposal, root: int, truth: Sequence[int]) -> Drafted:
    """What a proposal would have brought; truth: the tokens that came."""
    grown = grow("tree", proposal, root, WIDEST, DEPTH)
    child = {edge: node for node, edge in enumerate(zip(grown.tree.parents, grown.tree.tokens, strict=True))}
    path, node = [], 0
    for token in truth:
        if (found := child.get((node, token))) is None:
            break
        path.append(node := found)
    return Drafted(grown, path)


def recorded(config: EngineConfig, prompts: Sequence[Sequence[int]], tokens: int) -> list[Drafted]:
    """What the engine's drafter proposes while it continues prompts, and what came: at the start of every round."""
    coordinator, handshake = assemble(plan(config), [local_link()])
    while not handshake.advance(0.1):
        pass
    if isinstance(coordinator.drafter, DFlashDrafter):
        coordinator.drafter.shape = ""  # candidates: wider trees are made of them later
    propose, seen = coordinator.drafter.propose, []

    def recording(asks: Sequence[Ask]) -> list[Proposal | None]:
        found = propose(asks)
        for ask, proposal in zip(asks, found, strict=True):
            request = coordinator.scheduler.find(ask.seq)
            assert request is not None
            seen.append((request, len(request.tokens), proposal))
        return found

    coordinator.drafter.propose = recording  # type: ignore[method-assign]
    for i, prompt in enumerate(prompts):
        coordinator.submit(Request(i, tuple(prompt), SamplingParams(max_tokens=tokens)))
    while not coordinator.idle:
        coordinator.step()
    coordinator.fleet.close()
    whole = [(r, at, p) for r, at, p in seen if p is not None and at + DEPTH <= len(r.tokens)]
    return [drafted(p, r.tokens[at - 1], r.tokens[at : at + DEPTH]) for r, at, p in whole]


def of_text(model: Path, drafter: Path, ids: Sequence[int], count: int, tokens: int) -> list[Drafted]:
    """Recorded for `count` pieces of a text, each continued by `tokens` tokens."""
    size = min(64, len(ids))
    prompts = [ids[first : first + size] for first in range(0, len(ids), max(size, len(ids) // count))][:count]
    settings = DrafterConfig("dflash", model=str(drafter), topk=TOPK, budget=15)
    return recorded(EngineConfig(str(model), drafter=settings), prompts, tokens)


def rounds(drafts: Sequence[Drafted], batch: int, count: int, rng: random.Random) -> Iterator[list[Drafted]]:
    """Rounds of `batch` sequences, drawn from what there is."""
    for _ in range(count):
        yield rng.choices(drafts, k=batch)
