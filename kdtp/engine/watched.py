"""The trees that somebody watches: kept as long as they are asked for, made of what the round had anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kdtp.engine.outcome import Event, Outcome
from kdtp.engine.scheduler import Turn
from kdtp.proposals import Proposal
from kdtp.spec import tree
from kdtp.types import SeqRows
from kdtp.watch import Round


class Watched:
    """Requests whose rounds are to be shown, and how many of each."""

    def __init__(self) -> None:
        self._left: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._left)

    def ask(self, request_id: int, rounds: int) -> None:
        """Show the next rounds of an open request."""
        if rounds:
            self._left[request_id] = rounds
        else:
            self.forget(request_id)

    def forget(self, request_id: int) -> None:
        """Show no more of it."""
        self._left.pop(request_id, None)

    def events(
        self,
        turns: Sequence[Turn],
        rows: Sequence[SeqRows],
        proposals: Mapping[int, Proposal],
        outcomes: Sequence[Outcome],
        spent: Mapping[str, float],
    ) -> list[Event]:
        """The trees of this round. spent: seconds by stage."""
        timings = {stage: round(seconds * 1e3, 3) for stage, seconds in spent.items()}
        return [
            Event(_round(r, proposals.get(r.seq), outcome, timings))
            for turn, r, outcome in zip(turns, rows, outcomes, strict=True)
            if not turn.chunk and self._takes(r.seq)
        ]

    def _takes(self, request_id: int) -> bool:
        left = self._left.get(request_id, 0)
        self.ask(request_id, max(0, left - 1))
        return left > 0


def _round(rows: SeqRows, proposal: Proposal | None, outcome: Outcome, timings: dict[str, float]) -> Round:
    request, path = outcome.request, tuple(outcome.kept)
    scores = [0.0] if proposal is None else tree.scores(proposal, rows)
    position, bonus = len(request.tokens) - len(outcome.emitted), outcome.picked.ids[path[-1]]
    return Round(request.id, position, rows.tokens, rows.parents, tuple(scores), path, bonus, timings)
