"""What every drafter is: something that follows the text of open sequences and proposes how each goes on.

A proposal decides only which positions the next verify forward looks at, never a token: a bad one costs time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kdtp.types import Proposal


@dataclass(frozen=True)
class Ask:
    """Propose for `seq`, at most `depth` tokens after its newest one."""

    seq: int
    depth: int


class Drafter(Protocol):
    """One object for all sequences, so that a network can draft for them in one forward."""

    def open(self, seq: int, prompt: Sequence[int]) -> None:
        """Start to follow a sequence; its prompt is not followed by a token yet."""

    def absorb(self, seq: int, tokens: Sequence[int]) -> None:
        """Tokens emitted since the last call, in order; the newest is the next root."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal | None]:
        """Candidates for each ask, in order; None where there is nothing to propose. Changes no state."""
        ...

    def close(self, seq: int) -> None:
        """Forget a sequence."""
