"""A network that drafts on the ranks, beside the target: the coordinator's end of it."""

from __future__ import annotations

from collections.abc import Sequence

from kdtp.draft.base import Kept
from kdtp.draft.dflash.part import unpack
from kdtp.drafting import Root, Rows
from kdtp.engine.fleet import Fleet
from kdtp.proposals import Conditionals, Marginals


class OnRanks:
    """Sharded over the ranks, which load it with the target: what they draft is the same on all."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def start(self) -> None:
        """The ranks have it ready."""

    def keep(self, kept: Sequence[Kept]) -> None:
        """As Network; the ranks know the pages."""
        self._fleet.keep([Rows(each.seq, each.start, tuple(each.rows)) for each in kept])

    def draft(self, roots: Sequence[Root]) -> Sequence[Marginals | Conditionals]:
        """As Network. EngineFault as Fleet.draft."""
        shape, frame = self._fleet.draft(roots)
        return unpack(shape, frame).proposals()
