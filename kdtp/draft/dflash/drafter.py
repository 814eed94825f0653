"""DFlash as a drafter of the engine: it knows where each text stands, and asks the network for all who ask at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kdtp.draft.base import Ask, Kept
from kdtp.drafting import Root
from kdtp.proposals import Conditionals, Grown, Marginals, Proposal


class Network(Protocol):
    """The network, wherever it is."""

    def start(self) -> None:
        """Get ready, once the target is loaded."""

    def keep(self, kept: Sequence[Kept]) -> None:
        """Take the last forward's features at the rows that stay into the context."""

    def root(self, root: Root, pages: Sequence[int], told: bool) -> Root:
        """A root with as many of its pages as the network must be told; told: whether a forward has told them all."""
        ...

    def draft(self, roots: Sequence[Root], shape: str) -> Sequence[Marginals | Conditionals | Grown]:
        """What follows each root: candidates, or if a shape is named a tree of them, grown where they are."""
        ...


@dataclass
class _Follow:
    """One sequence: its newest token, how many tokens it has, and how many rows (not yet the newest token's); told:
    whether a forward has told its pages."""

    token: int
    tokens: int
    start: int
    told: bool = False


class DFlashDrafter:
    """Follows texts. With a shape it proposes trees, without one Marginals of version 1, Conditionals of version 2."""

    def __init__(self, network: Network, shape: str = "") -> None:
        self.shape = shape
        self._network = network
        self._seqs: dict[int, _Follow] = {}

    def start(self) -> None:
        """Get the network ready."""
        self._network.start()

    def admit(self, seq: int, tokens: Sequence[int], cached: int) -> None:
        """What the network knows of cached tokens lies in their pages, since the forward that ran them."""
        assert seq not in self._seqs, f"sequence {seq} is open"
        self._seqs[seq] = _Follow(tokens[-1], len(tokens), cached)

    def keep(self, kept: Sequence[Kept]) -> None:
        """Of all sequences, followed or not: their pages may be shared later."""
        self._network.keep(kept)
        for each in kept:
            if (follow := self._seqs.get(each.seq)) is not None:
                assert follow.start == each.start, f"sequence {each.seq}: {follow.start} rows, then from {each.start}"
                follow.start += len(each.rows)
                follow.told = True

    def absorb(self, seq: int, tokens: Sequence[int]) -> None:
        """The newest token is the next root."""
        follow = self._seqs[seq]
        follow.token, follow.tokens = tokens[-1], follow.tokens + len(tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal | None]:
        """One forward of the network for all."""
        found = self._network.draft([self._root(ask) for ask in asks], self.shape)
        return [_cut(proposal, ask.depth) for proposal, ask in zip(found, asks, strict=True)]

    def close(self, seq: int) -> None:
        """Forget a sequence; what its pages hold stays for those who share them."""
        del self._seqs[seq]

    def _root(self, ask: Ask) -> Root:
        follow = self._seqs[ask.seq]
        assert follow.start == follow.tokens - 1, f"sequence {ask.seq}: {follow.start} rows of {follow.tokens} tokens"
        root = Root(ask.seq, follow.token, follow.start, budget=ask.budget, depth=ask.depth)
        return self._network.root(root, ask.pages, follow.told)


def _cut(proposal: Marginals | Conditionals | Grown, depth: int) -> Proposal:
    return proposal if isinstance(proposal, Grown) else type(proposal)(proposal.lp[:depth], proposal.ids[:depth])
