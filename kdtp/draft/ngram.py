"""Lookup in the sequence's own text: what followed earlier occurrences of its last tokens. Needs no weights."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence

from kdtp.config import DrafterConfig
from kdtp.draft.base import Ask, OfText
from kdtp.proposals import Proposal, Trie


class _Text:
    """A text that knows the earlier occurrences of its last 1..longest tokens.

    For each length n: `last` maps n tokens to the position of the last of them where they were seen last, and
    `previous` maps each such position to the one before it (-1: none). Both grow by one entry per token and length.
    """

    def __init__(self, longest: int) -> None:
        self.tokens: list[int] = []
        self._last: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]
        self._previous = [array("q") for _ in range(longest)]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            size = len(self.tokens)
            for n, (last, previous) in enumerate(zip(self._last, self._previous, strict=True), start=1):
                # A text of fewer than n tokens is a key of its own length: it can never be met again.
                key = tuple(self.tokens[-n:])
                previous.append(last.get(key, -1))
                last[key] = size - 1

    def matches(self, most: int) -> dict[int, int]:
        """At most `most` earlier positions that end like the text: position -> match length, longest first, then
        most recent first."""
        found: dict[int, int] = {}
        for n in range(len(self._previous), 0, -1):
            previous = self._previous[n - 1]
            at = previous[-1] if previous else -1
            while at >= 0 and len(found) < most:
                found.setdefault(at, n)
                at = previous[at]
        return found


class Ngram(OfText):
    """Proposes the continuations of up to `topk` earlier matches of at most `ngram_max` tokens, merged into one trie.

    A match of n tokens weighs 2^(n-1). A node's probability is its weight over its parent's weight + 1: what is left
    is for a token not seen here before. No token id is special.
    """

    def __init__(self, config: DrafterConfig) -> None:
        self._config = config
        self._texts: dict[int, _Text] = {}

    def admit(self, seq: int, tokens: Sequence[int], cached: int) -> None:
        """Index the text, all of it: what is cached is text too."""
        assert seq not in self._texts, f"sequence {seq} is open"
        self._texts[seq] = _Text(self._config.ngram_max)
        self._texts[seq].extend(tokens)

    def absorb(self, seq: int, tokens: Sequence[int]) -> None:
        """Index the emitted tokens; the time does not depend on the length of the text."""
        self._texts[seq].extend(tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal | None]:
        """A trie for each ask whose newest token has been seen before."""
        return [self._propose(self._texts[ask.seq], ask.depth) for ask in asks]

    def close(self, seq: int) -> None:
        """Forget a sequence."""
        del self._texts[seq]

    def _propose(self, text: _Text, depth: int) -> Trie | None:
        found = text.matches(self._config.topk)
        if not found or depth < 1:
            return None
        node_of: dict[tuple[int, int], int] = {}  # (parent, token) -> node, in node order
        weight = [0.0]
        for end, length in found.items():
            node = 0
            weight[0] += 2.0 ** (length - 1)
            for token in text.tokens[end + 1 : end + 1 + depth]:
                node = node_of.setdefault((node, token), len(weight))
                if node == len(weight):
                    weight.append(0.0)
                weight[node] += 2.0 ** (length - 1)
        parents = [parent for parent, _ in node_of]
        lp = [math.log(w / (weight[parent] + 1.0)) for w, parent in zip(weight[1:], parents, strict=True)]
        return Trie([token for _, token in node_of], parents, lp)
