"""What every drafter is: something that follows the text of open sequences and proposes how each goes on.

A proposal decides only which positions the next verify forward looks at, never a token: a bad one costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kdtp.proposals import Proposal

if TYPE_CHECKING:
    import torch


class Target(Protocol):
    """What a network that drafts uses of the target beside it: one rank's part of embedding [n, H] and head [H, n], of
    ids vocab_start .. vocab_start + n - 1, and what forwards leave behind."""

    embed: torch.Tensor
    head: torch.Tensor
    vocab_start: int
    features: torch.Tensor | None

    @property
    def rows(self) -> int:
        """Rows of its KV cache."""
        ...

    def line(self, seq: int, count: int) -> torch.Tensor:
        """The cache row of each of the first `count` rows of a sequence, int64 [count], on the host."""
        ...

    def places(self, seq: int, start: int, count: int) -> list[int]:
        """As `line`, of `count` rows from row `start` on."""
        ...

    def tap(self, layers: Sequence[int]) -> torch.Tensor:
        """From now on `features` are, of the last forward's rows, the residual stream after each of these layers, side
        by side, [M, taps * H]. Returns the place where batches of few rows leave them."""
        ...


class Kept(NamedTuple):
    """What a forward has added to the committed rows of a sequence.

    rows: those of the forward's M rows that stay, for positions start, start + 1, ...; pages: the sequence's, at least
    up to the last of them. Position p is row p % PAGE_ROWS of page p // PAGE_ROWS.
    """

    seq: int
    start: int
    rows: Sequence[int]
    pages: Sequence[int]


class Ask(NamedTuple):
    """Propose for `seq`, at most `depth` tokens after its newest one. pages: as in Kept, for a drafter that kept;
    budget: nodes below that token, for a drafter that proposes a tree."""

    seq: int
    depth: int
    pages: Sequence[int] = ()
    budget: int = 0


class Drafter(Protocol):
    """One object for all sequences, so that a network can draft for them in one forward."""

    def start(self) -> None:
        """Get ready, once the target is loaded and before its first forward."""

    def admit(self, seq: int, tokens: Sequence[int], cached: int) -> None:
        """Start to follow a sequence, before its first forward: its prompt, or, after it was preempted, its whole text.

        cached: how many of the tokens come from the prefix cache. No forward will run them, so a drafter that lives on
        what a forward leaves behind keeps it by page, as the target does.
        """

    def keep(self, kept: Sequence[Kept]) -> None:
        """What the last forward has committed, of all sequences whose pages may be shared later, followed or not.

        Called before pages are freed, and before `absorb` of the same step.
        """

    def absorb(self, seq: int, tokens: Sequence[int]) -> None:
        """Tokens emitted since the last call, in order; the newest is the next root."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal | None]:
        """Candidates for each ask, in order; None where there is nothing to propose. Changes no state."""
        ...

    def close(self, seq: int) -> None:
        """Forget a sequence."""


class OfText:
    """Part of a drafter that needs the text alone."""

    def start(self) -> None:
        """Nothing to get ready."""

    def keep(self, kept: Sequence[Kept]) -> None:
        """What forwards leave behind is of no use."""
