"""What every drafter is: something that follows the text of open sequences and proposes how each goes on.

A proposal decides only which positions the next verify forward looks at, never a token: a bad one costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kdtp.proposals import Proposal


@dataclass(frozen=True)
class Ask:
    """Propose for `seq`, at most `depth` tokens after its newest one."""

    seq: int
    depth: int


class Drafter(Protocol):
    """One object for all sequences, so that a network can draft for them in one forward."""

    def admit(self, seq: int, tokens: Sequence[int], cached: int) -> None:
        """Start to follow a sequence, before its first forward: its prompt, or, after it was preempted, its whole text.

        cached: how many of the tokens come from the prefix cache. No forward will run them, so a drafter that lives on
        what a forward leaves behind must rebuild it for them, or keep it beside the pages.
        """

    def absorb(self, seq: int, tokens: Sequence[int]) -> None:
        """Tokens emitted since the last call, in order; the newest is the next root."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal | None]:
        """Candidates for each ask, in order; None where there is nothing to propose. Changes no state."""
        ...

    def close(self, seq: int) -> None:
        """Forget a sequence."""
