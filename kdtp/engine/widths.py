"""The width of rounds by what they cost here: measured at the start, and ever since."""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

from kdtp.config import DrafterConfig, EngineConfig, ModelConfig
from kdtp.draft.base import Ask, Drafter
from kdtp.engine.fleet import Fleet
from kdtp.engine.outcome import Outcome
from kdtp.engine.pages import PagePool, pages_for
from kdtp.engine.request import GREEDY
from kdtp.engine.scheduler import Turn
from kdtp.log import logger
from kdtp.messages import Begin
from kdtp.proposals import Grown
from kdtp.spec.costs import Costs
from kdtp.spec.width import Policy
from kdtp.types import GRAPH_ROWS, ROOT, TILE, SeqRows, power

_PATIENCE = 3.0  # seconds of measuring, captures not counted; what is left is read off the curve
_RUNS = 3  # of each size, at least, in each pass,
_WHILE = 0.01  # and for so many seconds
_FIRST = 1 << 52  # sequence ids that no request has
_TAUGHT = 8  # trees of a round, about, that are learned from: more say little more, and each takes time


class Widths:
    """A policy, told of the coordinator's rounds."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._asking = self._asked = 0  # sequences that could be drafted for in this round, and that were
        self._turn = 0  # whose it is when few are
        self._round = 0  # of those with drafts
        # Of the last round, not yet learned from: trees, and what stayed of each; and what `Policy.learn` is told.
        self._tried: Sequence[tuple[Grown, Sequence[int]]] = ()
        self._took: tuple[int, int, int, float] | None = None

    @classmethod
    def measured(
        cls, config: EngineConfig, model: ModelConfig, fleet: Fleet, pool: PagePool, drafter: Drafter
    ) -> Widths:
        """Of forwards of made-up trees at the start of a text, from one row to as many as a batch's trees have; and of
        drafts, for one sequence up to a batch."""
        padded = _graphs if config.device == "cuda" and config.graphs else _tiles
        most = config.max_batch * (1 + config.drafter.budget)
        # On a GPU one size more: without a graph rows cost far more.
        usual = (*GRAPH_ROWS, 2 * GRAPH_ROWS[-1]) if padded is _graphs else GRAPH_ROWS
        sizes = sorted({padded(rows) for rows in (*usual, most) if rows <= min(most, usual[-1])} | {1})
        best: dict[int, float] = {}  # by rows
        left, each = _PATIENCE, 0.0
        # In two passes: a size that looks dear as something came between would never be tried.
        for rows in 2 * sizes:
            if len(best) >= 2 and _RUNS * each * rows > left:
                break
            took = _forward(rows, 1 + config.drafter.budget, model.vocab_size, fleet, pool)
            if took is None:  # nor are there pages for more
                continue
            best[rows], each, left = min(took, best.get(rows, took)), took / rows, left - _RUNS * took
        curve = {padded(rows): took for rows, took in best.items()}
        logger.info("forwards, ms by rows: %s", _shown(curve))
        drafts = _drafts(config, drafter)
        logger.info("drafts, ms by sequences: %s", _shown(drafts))
        rounds = Costs(curve, padded)
        return cls(Policy(rounds, Costs(drafts, power if padded is _graphs else int, rounds)))

    def pick(self, asking: Sequence[Turn]) -> Sequence[Turn]:
        """Those to draft for in this round: all, none, or a few in turn."""
        self._asking, self._asked = len(asking), self.policy.drafts(len(asking))
        if self._asked in (0, self._asking):
            return asking[: self._asked]
        first = self._turn % len(asking)
        self._turn += self._asked
        return [*asking, *asking][first : first + self._asked]

    def cut(self, turns: Sequence[Turn], grown: Mapping[int, Grown], took: float) -> dict[int, Grown]:
        """The trees, as wide as it pays; took: seconds, of the draft."""
        if not self._asked:
            return dict(grown)
        self.catch_up()
        drafted = [seq for seq, tree in grown.items() if len(tree.tree) > 1]
        context = max(turn.request.start for turn in turns)
        trees = [grown[seq] for seq in drafted]
        rows = len(grown) + sum(turn.rows for turn in turns if turn.chunk)
        sizes = self.policy.choose(trees, self._asked, self._asking, len(grown), rows, context, took)
        return {**grown, **{seq: grown[seq].cut(size) for seq, size in zip(drafted, sizes, strict=True)}}

    def learn(
        self,
        rows: Sequence[SeqRows],
        grown: Mapping[int, Grown],
        outcomes: Sequence[Outcome],
        spent: Mapping[str, float],
        seconds: float,
    ) -> None:
        """What a round took, by stages and in all, and brought."""
        self.catch_up()
        context, drafting = max(r.start for r in rows), spent["draft"] + spent["build"]
        if self._asked:
            # What a grammar has taken away was never tried.
            trees = ((grown.get(r.seq), len(r.tokens), o) for r, o in zip(rows, outcomes, strict=True))
            tried = [(tree, o.kept) for tree, size, o in trees if tree is not None and len(tree.tree) == size > 1]
            self._round += 1
            apart = -(-len(tried) // _TAUGHT) or 1
            self._tried = tried[self._round % apart :: apart]
            accepted = sum(len(o.kept) - 1 for r, o in zip(rows, outcomes, strict=True) if r.seq in grown)
            self.policy.learn_draft(self._asked, context, drafting, accepted)
            self._asked = 0
        if len(grown) == len(rows):
            count = sum(len(r.tokens) for r in rows)
            self._took = len(rows), count, context, seconds - drafting

    def catch_up(self) -> None:
        """Learn from the last round what can wait for the next draft: best while that is waited for."""
        for tree, kept in self._tried:
            self.policy.learn_tree(tree, frozenset(kept))
        if self._took is not None:
            self.policy.learn(*self._took)
        self._tried, self._took = (), None


def _shown(curve: Mapping[int, float]) -> str:
    return ", ".join(f"{size}: {1000 * took:.1f}" for size, took in sorted(curve.items()))


def _graphs(rows: int) -> int:
    """What a batch is padded to; beyond graphs, roughly."""
    if rows <= GRAPH_ROWS[-1]:
        return GRAPH_ROWS[bisect_left(GRAPH_ROWS, rows)]
    return -(-rows // GRAPH_ROWS[-1]) * GRAPH_ROWS[-1]


def _tiles(rows: int) -> int:
    return -(-rows // TILE) * TILE


def _drafts(config: EngineConfig, drafter: Drafter) -> dict[int, float]:
    """Seconds of drafts for 1, 2, 4, ... sequences that have only begun."""
    curve: dict[int, float] = {}
    until, most = time.perf_counter() + _PATIENCE, power(config.max_batch)
    for seqs in (1 << i for i in range(most.bit_length())):
        if curve and time.perf_counter() + 2 * _RUNS * max(curve.values()) > until:
            break
        curve[seqs] = _draft(seqs, config.drafter, drafter)
    return curve


def _draft(seqs: int, config: DrafterConfig, drafter: Drafter) -> float:
    # No row of the page is read.
    asks = [Ask(_FIRST + i, config.block - 1, (0,), config.budget) for i in range(seqs)]
    for ask in asks:
        drafter.admit(ask.seq, (0,), 0)
    took = _fastest(lambda: drafter.propose(asks))
    for ask in asks:
        drafter.close(ask.seq)
    return took


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of a call, the best of some; the first one makes what the others find."""
    took: list[float] = []
    while len(took) < _RUNS or sum(took[1:]) < _WHILE:
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return min(took[1:])


def _forward(rows: int, each: int, vocab: int, fleet: Fleet, pool: PagePool) -> float | None:
    """Seconds of a forward of trees of up to `each` nodes, the best of some; None if there are no pages for it."""
    sizes = [min(each, rows - first) for first in range(0, rows, each)]
    pages = pool.take(sum(map(pages_for, sizes)))
    if pages is None:
        return None
    rng, left = random.Random(rows), iter(pages)
    seqs = [
        SeqRows(
            _FIRST + i,
            0,
            tuple(rng.randrange(vocab) for _ in range(size)),
            (ROOT, *((node - 1) // 2 for node in range(1, size))),
            size,
            tuple(itertools.islice(left, pages_for(size))),
        )
        for i, size in enumerate(sizes)
    ]

    def run() -> None:
        fleet.forward(seqs, [Begin(seq.seq, 1, GREEDY) for seq in seqs])
        fleet.commit([], [seq.seq for seq in seqs])

    took = _fastest(run)
    pool.give(pages)
    return took
