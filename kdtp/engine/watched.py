"""The trees that somebody watches: kept as long as they are asked for, made of what the round had anyway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kdtp.engine.outcome import Event, Outcome
from kdtp.engine.scheduler import Turn
from kdtp.proposals import Grown
from kdtp.types import ROOT, SeqRows
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
        grown: Mapping[int, Grown],
        outcomes: Sequence[Outcome],
        spent: Mapping[str, float],
    ) -> list[Event]:
        """The trees of this round. spent: seconds by stage."""
        timings = {stage: round(seconds * 1e3, 3) for stage, seconds in spent.items()}
        return [
            Event(_round(r, grown[r.seq], outcome, timings))
            for turn, r, outcome in zip(turns, rows, outcomes, strict=True)
            if not turn.chunk and self._takes(r.seq)
        ]

    def _takes(self, request_id: int) -> bool:
        left = self._left.get(request_id, 0)
        self.ask(request_id, max(0, left - 1))
        return left > 0


def _round(rows: SeqRows, grown: Grown, outcome: Outcome, timings: dict[str, float]) -> Round:
    request, path = outcome.request, tuple(outcome.kept)
    position, bonus = len(request.tokens) - len(outcome.emitted), outcome.picked.ids[path[-1]]
    return Round(request.id, position, rows.tokens, rows.parents, tuple(scores(rows, grown)), path, bonus, timings)


def scores(rows: SeqRows, grown: Grown) -> list[float]:
    """Of the nodes that were verified: all that had been grown, or what a grammar has left of them."""
    edges = {edge: node for node, edge in enumerate(zip(grown.tree.parents, grown.tree.tokens, strict=True))}
    nodes: list[int] = []
    for parent, token in zip(rows.parents, rows.tokens, strict=True):
        nodes.append(edges[ROOT if parent == ROOT else nodes[parent], token])
    return [grown.scores[node] for node in nodes]
