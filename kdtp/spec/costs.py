"""What rounds and drafts cost: curves measured once, and their measured changes."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping

from kdtp.types import power

SHORTEST = 1024  # positions; contexts are alike up to here, then by powers of two
_SURPRISES = 5  # newest ones, whose median is the pace
_LASTS = 0.98  # of what the pace explains is not learned: a pace that stays is usual after a while
_KNOWN = 3  # times of a kind, after which the next one tells of the pace
_KEPT = 9  # newest times of a kind, whose median counts
_STALE = 1000  # times learned, after which one is forgotten: who looked dear by chance is looked at again


class Costs:
    """Seconds of a round by sequences, rows and context: a curve over rows, measured once, and its measured changes.

    curve: rows -> seconds, at least one; padded: the rows that a batch of so many is computed with. What makes all
    rounds of a while slower, such as another program, is in `pace`: widths are compared as if measured together.
    leader: whose pace it has, for what is run too seldom to know it.
    """

    def __init__(self, curve: Mapping[int, float], padded: Callable[[int], int], leader: Costs | None = None) -> None:
        # Chance only adds time, and fewer rows never need more: what is less further up is the better figure.
        least = list(itertools.accumulate((curve[rows] for rows in sorted(curve, reverse=True)), min))
        self._curve = list(zip(sorted(curve), reversed(least), strict=True))
        self._bases: dict[int, float] = {}  # read off the curve
        self.padded = padded
        self._leader, self._pace = leader, 1.0
        self._surprises: deque[float] = deque(maxlen=_SURPRISES)
        self._ratios: dict[tuple[int, int, int], deque[tuple[int, float]]] = {}  # (when, measured over curve)
        self._of_kinds: dict[tuple[int, int], deque[tuple[float, float]]] = {}  # newest, as `_of_kind`
        self._round = 0

    @property
    def pace(self) -> float:
        """How many times the usual seconds everything takes now."""
        return self._pace if self._leader is None else self._leader.pace

    def learn(self, seqs: int, rows: int, context: int, seconds: float) -> None:
        """A round took so long."""
        self._round += 1
        kind, size = (power(seqs), _context(context)), self.padded(rows)
        if (*kind, size) not in self._ratios:  # in the first of a shape something is set up, such as a graph
            self._ratios[*kind, size] = deque(maxlen=_KEPT)
            return
        known, ratio = self._ratios[*kind, size], seconds / self._base(size)
        if len(known) >= _KNOWN:  # before, a surprise tells of this kind
            self._surprises.append(ratio / self._known(kind, size))
            self._pace = _median(self._surprises)
        ratio /= self.pace**_LASTS
        known.append((self._round, ratio))
        if kind not in self._of_kinds:
            self._of_kinds[kind] = deque([self._of_kind(*kind)], maxlen=2 * _KEPT - 1)
        self._of_kinds[kind].append((ratio, (ratio - 1.0) * self._base(size)))

    def seconds(self, seqs: int, rows: int, context: int) -> float:
        """What a round would take now."""
        return self.table(seqs, context, (self.padded(rows),))[0]

    def table(self, seqs: int, context: int, sizes: Iterable[int]) -> list[float]:
        """What rounds of each of these sizes, rows with padding, would take now."""
        kind, pace = (power(seqs), _context(context)), self.pace
        return [self._base(size) * self._known(kind, size) * pace for size in sizes]

    def _known(self, kind: tuple[int, int], size: int) -> float:
        """What rounds of this kind and size take, over the curve, at the usual pace."""
        oldest = self._round - _STALE
        newest = [ratio for when, ratio in self._ratios.get((*kind, size), ()) if when > oldest]
        if len(newest) < _KEPT:  # one time that was by chance longer is not alone
            # Whether others took so many times or so many seconds more is not known: who looks dear is never tried, so
            # it is the less.
            factor, more = self._of_kind(*kind)
            newest.append(min(factor, max(1.0 + more / self._base(size), 0.1)))
        return _median(newest)

    def _of_kind(self, seqs: int, context: int) -> tuple[float, float]:
        """What rounds of a kind, or of the nearest that was measured, take over the curve: how many times, and how many
        seconds more."""
        if not self._of_kinds:
            return 1.0, 0.0
        near = seqs, context
        if near not in self._of_kinds:
            near = min(
                self._of_kinds, key=lambda k: (abs(math.log2(k[0] / seqs)) + 2 * abs(math.log2(k[1] / context)), k)
            )
        factors, more = zip(*self._of_kinds[near], strict=True)
        return _median(factors), _median(more)

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
