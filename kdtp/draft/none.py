"""The drafter of plain decoding."""

from __future__ import annotations

from collections.abc import Sequence

from kdtp.draft.base import Ask, OfText
from kdtp.proposals import Proposal


class Nothing(OfText):
    """Proposes nothing, so that every tree is its root."""

    def admit(self, seq: int, tokens: Sequence[int], cached: int) -> None:
        """No text is kept."""

    def absorb(self, seq: int, tokens: Sequence[int]) -> None:
        """No text is kept."""

    def propose(self, asks: Sequence[Ask]) -> list[Proposal | None]:
        """None for every ask."""
        return [None] * len(asks)

    def close(self, seq: int) -> None:
        """No text is kept."""
