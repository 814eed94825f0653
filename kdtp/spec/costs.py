"""What rounds and drafts cost: curves measured once, and their measured changes."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from kdtp.types import power

SHORTEST = 1024  # positions; contexts are alike up to here, then by powers of two
_SURPRISES = 5  # newest ones, whose median is the pace
_LASTS = 0.98  # of what the pace explains is not learned: a pace that stays is usual after a while
_KNOWN = 3  # times of a kind, after which the next one tells of the pace
_KEPT = 9  # newest times of a kind, whose median counts
_STALE = 1000  # rounds, after which what others did not meet is forgotten: who looked dear by chance is looked at again


@dataclass
class _Times:
    """Of rounds of a kind and size: when the last one was learned, the newest times over the curve, their median."""

    last: int
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    median: float = 1.0


@dataclass
class _Kind:
    """Of rounds of a kind, whatever their size: when the last one was run, the newest times, their medians."""

    last: int
    newest: deque[tuple[float, float]]  # over the curve: how many times, and how many seconds more
    medians: tuple[float, float]


class Costs:
    """Seconds of a round by sequences, rows and context: a curve over rows, measured once, and its measured changes.

    curve: rows -> seconds, at least one; padded: the rows that a batch of so many is computed with. What makes all
    rounds of a while slower, such as another program, is in `pace`: widths are compared as if measured together.
    leader: whose pace and count of rounds it has, for what is run too seldom to know them.
    """

    def __init__(self, curve: Mapping[int, float], padded: Callable[[int], int], leader: Costs | None = None) -> None:
        # Chance only adds time, and fewer rows never need more: what is less further up is the better figure.
        least = list(itertools.accumulate((curve[rows] for rows in sorted(curve, reverse=True)), min))
        self._curve = list(zip(sorted(curve), reversed(least), strict=True))
        self._bases: dict[int, float] = {}  # read off the curve
        self.padded = padded
        self._leader, self._pace = leader, 1.0
        self._surprises: deque[float] = deque(maxlen=_SURPRISES)
        self._times: dict[tuple[int, int, int], _Times] = {}  # by sequences, context and size
        self._kinds: dict[tuple[int, int], _Kind] = {}  # by sequences and context
        self._rounds = 0  # learned from

    @property
    def pace(self) -> float:
        """How many times the usual seconds everything takes now."""
        return self._pace if self._leader is None else self._leader.pace

    @property
    def _now(self) -> int:
        """Of the leader's rounds, the number: what is run seldom gets old as all does."""
        return self._rounds if self._leader is None else self._leader._rounds

    def learn(self, seqs: int, rows: int, context: int, seconds: float) -> None:
        """A round took so long."""
        self._rounds += 1
        kind, size, now = (power(seqs), _context(context)), self.padded(rows), self._now
        times = self._times.get((*kind, size))
        if times is None:  # in the first of a shape something is set up, such as a graph
            self._times[*kind, size] = _Times(now)
            return
        if now - times.last > _STALE:
            times.ratios.clear()
        ratio, common = seconds / self._base(size), self._of_kind(*kind)
        if len(times.ratios) >= _KNOWN:  # before, a surprise tells of this kind
            self._surprises.append(ratio / self._known(times, size, common))
            self._pace = _median(self._surprises)
        ratio /= self.pace**_LASTS
        times.ratios.append(ratio)
        times.last, times.median = now, _median(times.ratios)
        known = self._kinds.setdefault(kind, _Kind(now, deque([common], maxlen=2 * _KEPT - 1), common))
        known.newest.append((ratio, (ratio - 1.0) * self._base(size)))
        factors, more = zip(*known.newest, strict=True)
        known.medians = _median(factors), _median(more)
        self.meet(seqs, context)

    def meet(self, seqs: int, context: int) -> None:
        """A round of that kind was run. Kinds that were not, for long, are forgotten."""
        kind, now = (power(seqs), _context(context)), self._now
        if kind in self._kinds:
            self._kinds[kind].last = now
            self._kinds = {each: known for each, known in self._kinds.items() if now - known.last <= _STALE}

    def seconds(self, seqs: int, rows: int, context: int) -> float:
        """What a round would take now."""
        return self.table(seqs, context, (self.padded(rows),))[0]

    def table(self, seqs: int, context: int, sizes: Iterable[int]) -> list[float]:
        """What rounds of each of these sizes, rows with padding, would take now."""
        kind, pace = (power(seqs), _context(context)), self.pace
        common = self._of_kind(*kind)
        return [self._base(size) * self._known(self._times.get((*kind, size)), size, common) * pace for size in sizes]

    def _known(self, times: _Times | None, size: int, common: tuple[float, float]) -> float:
        """What rounds take, over the curve, at the usual pace; common: of their kind."""
        ratios = times.ratios if times is not None and self._now - times.last <= _STALE else ()
        if times is not None and len(ratios) == _KEPT:
            return times.median
        # Whether others took so many times or so many seconds more is not known: it is the less, as who looks dear is
        # never tried. It counts beside a few measured ones, too: one that was by chance longer is not alone.
        factor, more = common
        return _median([*ratios, min(factor, 1.0 + max(more, 0.0) / self._base(size))])

    def _of_kind(self, seqs: int, context: int) -> tuple[float, float]:
        """What rounds of a kind, or of the nearest that is known, take over the curve: how many times, and how many
        seconds more."""
        kinds = self._kinds
        if not kinds:
            return 1.0, 0.0
        near = seqs, context
        if near not in kinds:
            near = min(kinds, key=lambda k: (abs(math.log2(k[0] / seqs)) + 2 * abs(math.log2(k[1] / context)), k))
        return kinds[near].medians

    def _base(self, rows: int) -> float:
        """The curve, straight between what was measured and beyond it."""
        if rows not in self._bases:
            self._bases[rows] = self._read_off(rows)
        return self._bases[rows]

    def _read_off(self, rows: int) -> float:
        points = self._curve
        after = next((i for i, (size, _) in enumerate(points) if size >= rows), len(points) - 1)
        if points[after][0] == rows or len(points) == 1:
            return points[after][1]
        (x0, y0), (x1, y1) = points[max(after - 1, 0)], points[max(after, 1)]
        return max(y0 + (y1 - y0) * (rows - x0) / (x1 - x0), 0.1 * y0)


def _median(values: Iterable[float]) -> float:
    """The lower one of two."""
    ordered = sorted(values)
    return ordered[(len(ordered) - 1) // 2]


def _context(start: int) -> int:
    return max(SHORTEST, power(start))
