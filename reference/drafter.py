"""A drafter that knows the text, and errs as told: it drives every kind of acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.tree import Marginals


class Oracle:
    """Proposes from the true text (prompt and continuation).

    At depth d + 1 the truth is a candidate with probability hit[d] (the last value holds for deeper ones), at a random
    rank below `rank`; all other candidates are wrong. topk: candidates per depth, at most vocab_size - 1.
    """

    def __init__(
        self, text: Sequence[int], vocab_size: int, hit: Sequence[float], rank: int = 1, topk: int = 8, seed: int = 0
    ) -> None:
        self.text, self.vocab_size, self.hit, self.rank, self.topk = list(text), vocab_size, hit, rank, topk
        self.random = np.random.default_rng(seed)

    def propose(self, known: Sequence[int], depth: int) -> Marginals | None:
        """Candidates for the `depth` tokens after the known ones; None when the text ends here."""
        truth = self.text[len(known) : len(known) + depth]
        if not truth:
            return None
        ids = np.stack([self.candidates(d, token) for d, token in enumerate(truth)])
        logits = -np.sort(-self.random.normal(0.0, 2.0, ids.shape), axis=-1)
        log_z = np.log(np.exp(logits).sum(axis=-1, keepdims=True) + 0.1)  # some mass is elsewhere
        return Marginals((logits - log_z).astype(np.float32), ids)

    def candidates(self, d: int, truth: int) -> np.ndarray:
        """Token ids of depth d + 1 in rank order, int64 [topk]."""
        wrong = np.delete(np.arange(self.vocab_size), truth)
        ids = self.random.choice(wrong, self.topk, replace=False)
        if self.random.random() < self.hit[min(d, len(self.hit) - 1)]:
            ids[self.random.integers(min(self.rank, self.topk))] = truth
        return ids
