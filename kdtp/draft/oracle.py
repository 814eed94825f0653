"""A drafter that knows golden texts and errs as told, so that every kind of acceptance happens in a test."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kdtp.config import DrafterConfig
from kdtp.draft.base import Ask, OfText
from kdtp.proposals import Marginals, Proposal


@dataclass
class _Follow:
    """One sequence: its golden continuation (empty: unknown, or left), tokens emitted, and a digest of its prompt."""

    golden: tuple[int, ...]
    emitted: int
    key: str


class Oracle(OfText):
    """Proposes from golden continuations, keyed by prompt.

    At depth d + 1 the truth is a candidate with probability hit[d], at a random rank below `rank`; all others are
    wrong. A sequence that has no golden continuation, has left it or reached its end gets None. What is proposed is a
    function of (config.seed, prompt, tokens emitted): a request does not depend on its neighbours.
    """

    def __init__(
        self, config: DrafterConfig, golden: Mapping[tuple[int, ...], tuple[int, ...]], vocab_size: int
    ) -> None:
        if vocab_size < 2:
            raise ValueError(f"vocab_size = {vocab_size}: the oracle needs a wrong token beside the right one")
        self._config = config
        self._golden = golden
        self._wrong = vocab_size - 1
        self._topk = min(config.topk, self._wrong)
        # The gap after rank 0 exceeds what a path of 64 first ranks loses, so a perfect oracle's chain comes first.
        score = -torch.arange(self._topk, dtype=torch.float32)
        score[1:] -= 3.0
        self._lp = score.log_softmax(dim=0)
        self._seqs: dict[int, _Follow] = {}

    def admit(self, seq: int, tokens: Sequence[int], cached: int) -> None:
        """Look up the golden continuation of the prompt that the text begins with."""
        assert seq not in self._seqs, f"sequence {seq} is open"
        prompt = self._prompt(tuple(tokens))
        key = hashlib.sha256(repr(prompt).encode()).hexdigest()
        self._seqs[seq] = _Follow(self._golden.get(prompt, ()), len(tokens) - len(prompt), key)

    def _prompt(self, text: tuple[int, ...]) -> tuple[int, ...]:
        """The longest known prompt whose golden text goes on like this one; the text itself if there is none."""
        known = [p for p, golden in self._golden.items() if len(p) <= len(text) and (p + golden)[: len(text)] == text]
        return max(known, key=len, default=text)

    def absorb(self, seq: int, tokens: Sequence[int]) -> None:
        """Compare the emitted tokens with the golden ones."""
        follow = self._seqs[seq]
        start, follow.emitted = follow.emitted, follow.emitted + len(tokens)
        if tuple(tokens) != follow.golden[start : follow.emitted]:
            follow.golden = ()

    def propose(self, asks: Sequence[Ask]) -> list[Proposal | None]:
        """Marginals over at most the golden tokens that are left."""
        return [self._propose(self._seqs[ask.seq], ask.depth) for ask in asks]

    def close(self, seq: int) -> None:
        """Forget a sequence."""
        del self._seqs[seq]

    def _propose(self, follow: _Follow, depth: int) -> Marginals | None:
        truth = follow.golden[follow.emitted : follow.emitted + depth]
        if not truth:
            return None
        rng = random.Random(f"{self._config.seed} {follow.key} {follow.emitted}")
        ids = [self._candidates(rng, d, token) for d, token in enumerate(truth)]
        return Marginals(self._lp.expand(len(ids), -1), torch.tensor(ids))

    def _candidates(self, rng: random.Random, d: int, truth: int) -> list[int]:
        """Distinct token ids of depth d + 1 in rank order."""
        ids = [i + (i >= truth) for i in rng.sample(range(self._wrong), self._topk)]
        if rng.random() < self._config.hit[min(d, len(self._config.hit) - 1)]:
            ids[rng.randrange(min(self._config.rank, self._topk))] = truth
        return ids
