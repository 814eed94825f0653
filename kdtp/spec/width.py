"""How many nodes a round verifies: those that bring the most expected tokens per second, none if none pay.

A node costs time, on a mixture of experts about as much as its own experts, and what it costs is no convex function of
the width: so all widths are looked at, never only the next one. What a width costs is measured; what a node is worth
is its score under the drafter, corrected by what became of nodes like it. Source: DDTree's expected accepted length.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median_low

from kdtp.proposals import Grown

BINS = 16  # of scores, half a nat each; the last has all that are lower
SHORTEST = 1024  # positions; contexts are alike up to here, then by powers of two
_TRUST = 2.0  # accepted tokens that the drafter's own word counts for
_FADE = 0.998  # per tree, of what was learned
_FOLLOWS = 0.3  # how much of a surprise is taken for a change of pace
_KEPT = 5  # newest times of a kind, whose median counts
_TRIED = 3  # nodes, at least, of a round that is to show whether drafting pays
_STALE = 500  # rounds after which a time is forgotten


def allot(
    worth: Sequence[Sequence[float]],
    seconds: Callable[[int], float],
    tokens: float,
    before: float = 0.0,
    least: int = 0,
) -> tuple[list[int], float]:
    """How many nodes of each sequence to verify, and expected tokens per second.

    worth: of each sequence's nodes, in an order whose beginnings are trees, the chance to be accepted; seconds(n): of a
    round with n nodes in all; tokens: that come with none of them; before: seconds that are spent already; least: nodes
    to take in any case, if there are so many.
    """
    pool: list[tuple[float, int, int]] = []
    for seq, values in enumerate(worth):
        lowest = 1.0  # a node cannot come before those that it needs: it counts no more than they
        for node, value in enumerate(values):
            lowest = min(lowest, value)
            pool.append((-lowest, seq, node))
    pool.sort()
    count, gained = 0, tokens
    best = tokens / (before + seconds(0))
    for n, (_, seq, node) in enumerate(pool, start=1):
        gained += worth[seq][node]
        if (rate := gained / (before + seconds(n))) > best or n <= least:
            best, count = rate, n
    sizes = [0] * len(worth)
    for _, seq, _ in pool[:count]:
        sizes[seq] += 1
    return sizes, best


class Calibration:
    """What a drafter's scores are worth: accepted over expected, for each depth and kind of score."""

    def __init__(self) -> None:
        self._accepted: dict[tuple[int, int], float] = {}
        self._expected: dict[tuple[int, int], float] = {}

    def worth(self, scores: Sequence[float], depths: Sequence[int], parents: Sequence[int]) -> list[float]:
        """The chance of each node to be accepted, the root's 1; scores: log-probabilities of paths, of all nodes."""
        found = [1.0]
        for score, depth, parent in zip(scores[1:], depths[1:], parents[1:], strict=True):
            kind = depth, _bin(score)
            ratio = (self._accepted.get(kind, 0.0) + _TRUST) / (self._expected.get(kind, 0.0) + _TRUST)
            found.append(min(found[parent], math.exp(score) * ratio))
        return found

    def learn(self, scores: Sequence[float], depths: Sequence[int], accepted: Collection[int]) -> None:
        """What became of the nodes of a tree that was verified; accepted: nodes of the path."""
        for counts in (self._accepted, self._expected):
            for kind in counts:
                counts[kind] *= _FADE
        for node in range(1, len(scores)):
            kind = depths[node], _bin(scores[node])
            self._expected[kind] = self._expected.get(kind, 0.0) + math.exp(scores[node])
            self._accepted[kind] = self._accepted.get(kind, 0.0) + (node in accepted)


def _bin(score: float) -> int:
    return int(min(-2.0 * score, BINS - 1))


class Costs:
    """Seconds of a round by sequences, rows and context: a curve over rows, measured once, and its measured changes.

    curve: rows -> seconds, at least one; padded: the rows that a batch of so many is computed with. What makes all
    rounds of a while slower, such as another program, is in `pace`: widths are compared as if measured together.
    """

    def __init__(self, curve: Mapping[int, float], padded: Callable[[int], int]) -> None:
        # Chance only adds time, and fewer rows never need more: what is less further up is the better figure.
        least = list(itertools.accumulate((curve[rows] for rows in sorted(curve, reverse=True)), min))
        self._curve = list(zip(sorted(curve), reversed(least), strict=True))
        self.padded = padded
        self.pace = 1.0
        self._ratios: dict[tuple[int, int, int], deque[tuple[int, float]]] = {}  # (when, measured over curve)
        self._factors: dict[tuple[int, int], deque[float]] = {}
        self._round = 0

    def learn(self, seqs: int, rows: int, context: int, seconds: float) -> None:
        """A round took so long."""
        self._round += 1
        kind, size = (_power(seqs), _context(context)), self.padded(rows)
        surprise = seconds / self.seconds(seqs, rows, context)
        self.pace *= min(max(surprise, 0.5), 2.0) ** _FOLLOWS
        ratio = seconds / (self._base(size) * self.pace)
        self._ratios.setdefault((*kind, size), deque(maxlen=_KEPT)).append((self._round, ratio))
        if kind not in self._factors:
            self._factors[kind] = deque([self._factor(*kind)], maxlen=2 * _KEPT - 1)
        self._factors[kind].append(ratio)

    def seconds(self, seqs: int, rows: int, context: int) -> float:
        """What a round would take now."""
        kind, size = (_power(seqs), _context(context)), self.padded(rows)
        common = self._factor(*kind)
        newest = [r for when, r in self._ratios.get((*kind, size), ()) if when > self._round - _STALE]
        # One time that was by chance longer, as the first of a shape may be, does not count alone.
        ratio = median_low([common, *newest] if len(newest) < _KEPT else newest)
        return self._base(size) * ratio * self.pace

    def _factor(self, seqs: int, context: int) -> float:
        """Of the nearest kind that was measured."""
        if not self._factors:
            return 1.0
        near = min(self._factors, key=lambda k: (abs(math.log2(k[0] / seqs)) + 2 * abs(math.log2(k[1] / context)), k))
        return median_low(self._factors[near])

    def _base(self, rows: int) -> float:
        """The curve, straight between what was measured and beyond it."""
        points = self._curve
        after = next((i for i, (size, _) in enumerate(points) if size >= rows), len(points) - 1)
        if points[after][0] == rows or len(points) == 1:
            return points[after][1]
        (x0, y0), (x1, y1) = points[max(after - 1, 0)], points[max(after, 1)]
        return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), 0.1 * y0)


def _power(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def _context(start: int) -> int:
    return max(SHORTEST, _power(start))


class Pauses:
    """Whether to draft at all: not for a while once it was no better than plain decoding, tried again ever more
    rarely, at least once in LONGEST rounds."""

    LONGEST = 64

    def __init__(self) -> None:
        self._left = 0
        self._pause = 1
        self._gain = 1.0
        self.tries = True  # whether this is the first round after a pause

    def drafts(self) -> bool:
        """Whether to draft in this round; counts it."""
        self._left -= 1
        return self._left < 0

    def learn(self, gain: float) -> None:
        """A round that drafted promised so many times the tokens per second of plain decoding."""
        self.tries = False
        self._gain += 0.2 * (min(gain, 2.0) - self._gain)
        if self._gain > 1.0:
            self._pause = 1
            return
        self._left, self._gain, self.tries = self._pause, 1.0, True
        self._pause = min(2 * self._pause, self.LONGEST)


class Policy:
    """Decides the widths of rounds, and learns from what they took and brought. Rounds with more than their trees, such
    as chunks of prompts, are not learned from."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.calibration = Calibration()
        self._pauses: dict[int, Pauses] = {}  # by sequences
        self._draft: dict[int, deque[float]] = {}

    def drafts(self, seqs: int) -> bool:
        """Whether a round of so many sequences that may draft should."""
        return self._pauses.setdefault(_power(seqs), Pauses()).drafts()

    def choose(self, trees: Sequence[Grown], asked: int, seqs: int, context: int) -> list[int]:
        """How many nodes below its root each drafted tree is cut to.

        asked: sequences that were drafted for; seqs: all of the round; context: of the longest.
        """
        worth = [self.calibration.worth(t.scores, t.tree.depths, t.tree.parents)[1:] for t in trees]
        known: dict[int, float] = {}
        least = math.inf
        for nodes in range(sum(map(len, worth)), -1, -1):
            size = self.costs.padded(seqs + nodes)
            if size not in known:  # more rows need no less time: what is measured otherwise is chance
                known[size] = least = min(least, self.costs.seconds(seqs, size, context))

        def seconds(nodes: int) -> float:
            return known[self.costs.padded(seqs + nodes)]

        before, pauses = self._draft_seconds(asked), self._pauses.setdefault(_power(asked), Pauses())
        sizes, rate = allot(worth, seconds, seqs, before)
        if not any(sizes) and pauses.tries:  # or nothing would ever be learned
            sizes, _ = allot(worth, seconds, seqs, before, least=_TRIED)
        pauses.learn(rate * seconds(0) / seqs)
        return sizes

    def learn(self, seqs: int, rows: int, context: int, seconds: float) -> None:
        """What a round of so many sequences and rows took after its draft."""
        self.costs.learn(seqs, rows, context, seconds)

    def learn_draft(self, seqs: int, seconds: float) -> None:
        """What drafting for so many sequences took."""
        self._draft.setdefault(_power(seqs), deque(maxlen=_KEPT)).append(seconds / self.costs.pace)

    def learn_tree(self, grown: Grown, accepted: Collection[int]) -> None:
        """What became of a tree that was verified."""
        self.calibration.learn(grown.scores, grown.tree.depths, accepted)

    def _draft_seconds(self, seqs: int) -> float:
        newest = self._draft.get(_power(seqs))
        return median_low(newest) * self.costs.pace if newest else 0.0
