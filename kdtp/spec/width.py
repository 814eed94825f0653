"""How many nodes a round verifies: those that bring the most expected tokens per second, none if none pay.

A node costs time, on a mixture of experts about as much as its own experts, and what it costs is no convex function of
the width: so all widths are looked at, never only the next one. What a width costs is measured, and so is the draft;
what a node is worth is its score under the drafter, corrected by what became of nodes like it. Where drafts do not pay,
rounds are plain, and now and then a few sequences are drafted for, to see whether they would. Source: DDTree's
expected accepted length.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from kdtp.proposals import Grown
from kdtp.spec.costs import Costs
from kdtp.types import power

BINS = 16  # of scores, half a nat each; the last has all that are lower
_TRUST = 2.0  # accepted tokens that the drafter's own word counts for
_FADE = 0.998  # per tree, of what was learned
_TRIED = 3  # nodes, at least, of a trial
_NEWEST = 0.2  # how much a round counts in the gain,
_AGES = 0.95  # and how much less after each plain round
_ENTERS = 1.03  # gain from which on all are drafted for; they are until it is below 1
_TRIALS = 0.01  # of plain rounds is lost to trials after a while;
_LOSS = 0.02  # of them may be lost to drafts that do not pay,
_CREDIT = 4.0  # beside so many at first


class Allotted(NamedTuple):
    """How many nodes of each sequence to verify; tokens expected in such a round; its seconds, spent ones too."""

    sizes: list[int]
    tokens: float
    seconds: float


def allot(
    worth: Sequence[Sequence[float]],
    seconds: Callable[[int], float],
    tokens: float,
    before: float = 0.0,
    least: int = 0,
) -> Allotted:
    """Those nodes that bring the most tokens per second.

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
    count, best, spent = 0, tokens, before + seconds(0)
    for n, (_, seq, node) in enumerate(pool, start=1):
        tokens += worth[seq][node]
        took = before + seconds(n)
        if tokens * spent > best * took or n <= least:
            count, best, spent = n, tokens, took
    sizes = [0] * len(worth)
    for _, seq, _ in pool[:count]:
        sizes[seq] += 1
    return Allotted(sizes, best, spent)


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


class Pauses:
    """Whether drafting pays for about so many sequences: then every round drafts for all. If not, a trial drafts for
    few, after 1, 2, 4, ... at most LONGEST plain rounds, or as many as make trials cost _TRIALS of the time; and only
    as long as what is lost is below _LOSS of the time."""

    LONGEST = 64

    def __init__(self) -> None:
        self.pays = False
        self._left, self._pause = 0, 1
        self._credit = _CREDIT
        self._with = self._without = 0.0  # seconds of late rounds, and of plain ones for the same tokens

    def drafts(self) -> bool:
        """Whether to draft in this round; counts it."""
        self._left -= 1
        self._credit = min(self._credit + _LOSS, _CREDIT)
        if self.pays or self._left < 0 <= self._credit:
            return True
        self._with, self._without = _AGES * self._with, _AGES * self._without
        return False

    def learn(self, seconds: float, plain: float, loss: float) -> None:
        """All drafted for, a round would take so long, and plain decoding, for its tokens, `plain`; loss: plain rounds
        that could have been run in the time that this one loses."""
        self._credit -= loss
        self._with += _NEWEST * (seconds - self._with)
        self._without += _NEWEST * (plain - self._without)
        self.pays = self._without > (1.0 if self.pays else _ENTERS) * self._with
        # What looks well by itself is looked at again soon, and so is what costs little to look at.
        longest = min(max(1, math.ceil(loss / _TRIALS)), self.LONGEST)
        self._pause = 1 if self.pays or plain > _ENTERS * seconds else min(2 * self._pause, longest)
        self._left = self._pause


class Policy:
    """Decides the widths of rounds, and learns from what they took and brought. Rounds with more than their trees, such
    as chunks of prompts, are not learned from.

    rounds, drafting: what they cost; drafting by the sequences that are drafted for.
    """

    def __init__(self, rounds: Costs, drafting: Costs) -> None:
        self.rounds, self.drafting = rounds, drafting
        self.calibration = Calibration()
        self._pauses: dict[int, Pauses] = {}  # by sequences

    def drafts(self, asking: int) -> int:
        """For how many of those that ask to draft in this round: all, none, or for a trial the root of their number."""
        pauses = self._pauses.setdefault(power(asking), Pauses())
        if not pauses.drafts():
            return 0
        return asking if pauses.pays else math.isqrt(asking - 1) + 1

    def choose(self, trees: Sequence[Grown], asked: int, asking: int, seqs: int, context: int) -> list[int]:
        """How many nodes below its root each drafted tree is cut to.

        asked, asking: sequences that were drafted for, of those that could be; seqs: all of the round; context: of the
        longest.
        """
        worth = [self.calibration.worth(t.scores, t.tree.depths, t.tree.parents)[1:] for t in trees]
        pauses, share = self._pauses.setdefault(power(asking), Pauses()), asking / asked
        seconds = self._seconds(seqs, math.ceil(share * sum(map(len, worth))), context)
        before = self.drafting.seconds(asked, asked, context)
        chosen = every = allot(worth, seconds, seqs, before, 0 if pauses.pays else _TRIED)
        if not pauses.pays:  # what all would bring, if their trees were like those of the few
            before = self.drafting.seconds(asking, asking, context)
            every = allot(worth, lambda nodes: seconds(share * nodes), seqs / share, before)
        plain = seconds(0) / seqs  # of a token
        loss = (chosen.seconds - plain * chosen.tokens) / seconds(0)
        pauses.learn(every.seconds, plain * share * every.tokens, loss)
        return chosen.sizes

    def _seconds(self, seqs: int, most: int, context: int) -> Callable[[float], float]:
        """What a round with at most so many nodes takes, by nodes: more need no less, what is measured otherwise is
        chance."""
        known: dict[int, float] = {}
        least = math.inf
        for nodes in range(most, -1, -1):
            size = self.rounds.padded(seqs + nodes)
            if size not in known:
                known[size] = least = min(least, self.rounds.seconds(seqs, size, context))
        return lambda nodes: known[self.rounds.padded(seqs + math.ceil(nodes))]

    def learn(self, seqs: int, rows: int, context: int, seconds: float) -> None:
        """What a round of so many sequences and rows took, but for its draft."""
        self.rounds.learn(seqs, rows, context, seconds)

    def learn_draft(self, asked: int, context: int, seconds: float) -> None:
        """What drafting for so many sequences took, their trees too."""
        self.drafting.learn(asked, asked, context, seconds)

    def learn_tree(self, grown: Grown, accepted: Collection[int]) -> None:
        """What became of a tree that was verified."""
        self.calibration.learn(grown.scores, grown.tree.depths, accepted)
