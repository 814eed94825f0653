"""How many nodes a round verifies: those that bring the most expected tokens per second, none if none pay.

A node costs time, on a mixture of experts about as much as its own experts, and what it costs is no convex function of
the width: so all widths are looked at, never only the next one. What a width costs is measured, and so is the draft;
what a node is worth is its score under the drafter, corrected by what became of nodes like it. Where drafts do not pay,
rounds are plain, and now and then a few sequences are drafted for, to see whether they would. Source: DDTree's
expected accepted length.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kdtp.proposals import Grown
from kdtp.spec.costs import Costs
from kdtp.types import power

BINS = 33  # of scores, a quarter of a nat each; the last has all that are lower
_LOWEST = -8.0
_TRUST = 2.0  # expected tokens that what is known of higher scores counts for; of the highest, the drafter's word
_FADE = 0.998  # per tree, of what was learned
_TRIED = 3  # nodes, at least, of a trial
_NEWEST = 0.05  # how much a round of one tree counts in the gain, more of them by the root of their number,
_AGES = 0.95  # and how much less after each plain round
_ENTERS = 1.03  # gain from which on all are drafted for; they are until it is below 1
_FIRST = 4  # rounds are plain, as what they take is to be known,
_PLAIN = 40  # and one of so many that pay
_TRIALS = 0.01  # of plain rounds is lost to trials after a while;
_LOSS = 0.01  # of them may be lost to drafts that do not pay,
_CREDIT = 4.0  # beside so many at first,
_EARNED = 8.0  # or, at most, what drafts have won before
_LITTLE = 0.1  # tokens, beside which what is hoped for tells something
_CLEARLY = 0.8  # of what was expected is no chance,
_HICCUP = 2.0  # plain rounds more are one


class Allotted(NamedTuple):
    """How many nodes of each sequence to verify; tokens expected in such a round; its seconds, spent ones too."""

    sizes: list[int]
    tokens: float
    seconds: float


def allot(
    worth: Sequence[Sequence[float]],
    steps: Sequence[tuple[int, float]],
    tokens: float,
    before: float = 0.0,
    least: int = 0,
) -> Allotted:
    """Those nodes that bring the most tokens per second.

    worth: of each sequence's nodes, in an order whose beginnings are trees, the chance to be accepted; steps: (n,
    seconds) of a round with at most n nodes in all, n rising up to the number of nodes or beyond; tokens: that come
    with none of them; before: seconds that are spent already; least: nodes to take in any case, if there are so many.
    """
    values = [value for own in worth for value in own]
    owners = [seq for seq, own in enumerate(worth) for _ in own]
    # A node cannot come before those that it needs: it counts no more than they.
    places = []
    for own in worth:
        lowest = math.inf
        for value in own:
            if value < lowest:
                lowest = value
            places.append(lowest)
    order = sorted(range(len(values)), key=places.__getitem__, reverse=True)  # stable: of equals the first
    gained = list(itertools.accumulate(map(values.__getitem__, order), initial=tokens))
    least, count, spent = min(least, len(values)), -1, 1.0
    for most, seconds in steps:
        n = min(most, len(values))
        if n >= least and (count < 0 or gained[n] * spent > gained[count] * (before + seconds)):
            count, spent = n, before + seconds
    taken = Counter(map(owners.__getitem__, order[:count]))
    sizes = [taken[seq] for seq in range(len(worth))]
    return Allotted(sizes, gained[count], spent)


class Calibration:
    """What a drafter's scores are worth: accepted over expected, by about how low they are. At the same score it makes
    no difference how deep a node is.

    Until it is known of a bin, it is as of the one above: a drafter that says too little of its first nodes does so of
    the next, and else they would never be tried.
    """

    def __init__(self) -> None:
        self._accepted = [0.0] * BINS
        self._expected = [0.0] * BINS
        self._ratios = [1.0] * BINS

    def worth(self, scores: Sequence[float]) -> list[float]:
        """The chance of each node to be accepted; scores: log-probabilities of their paths."""
        ratios, last = self._ratios, self._ratios[-1]
        # Hundreds of nodes a round: what would call _bin, or min below, takes a multiple of the time.
        return [math.exp(s) * (ratios[int(-4.0 * s)] if s > _LOWEST else last) for s in scores]

    def learn(self, scores: Sequence[float], accepted: Collection[int]) -> None:
        """What became of the nodes of a tree that was verified, the root first; accepted: nodes of the path."""
        self._accepted = [_FADE * value for value in self._accepted]
        self._expected = [_FADE * value for value in self._expected]
        for score in scores[1:]:
            self._expected[_bin(score)] += math.exp(score)
        for node in accepted:
            if node:
                self._accepted[_bin(scores[node])] += 1.0
        self._ratios, ratio = [], 1.0
        for came, expected in zip(self._accepted, self._expected, strict=True):
            ratio = (came + _TRUST * ratio) / (expected + _TRUST)
            self._ratios.append(ratio)


def _bin(score: float) -> int:
    return int(-4.0 * score) if score > _LOWEST else BINS - 1


class Pauses:
    """Whether drafting pays for about so many sequences: then nearly every round drafts for all. If not, a trial drafts
    for few, after 1, 2, 4, ... at most LONGEST plain rounds, or as many as make trials cost _TRIALS of the time; and
    only as long as what is lost is below _LOSS of the time."""

    LONGEST = 64

    def __init__(self) -> None:
        self.pays = False
        self._left, self._pause = _FIRST, 1
        self._paid = 1  # rounds since one was plain
        self._credit = _CREDIT
        self._with = self._without = 0.0  # time of late rounds, and of plain ones for the same tokens

    def drafts(self) -> bool:
        """Whether to draft in this round; counts it."""
        self._left -= 1
        self._paid = (self._paid + 1) % _PLAIN if self.pays else 0
        self._credit = max(self._credit, min(self._credit + _LOSS, _CREDIT))
        if self.pays:
            return self._paid > 0
        if self._left < 0 <= self._credit:
            return True
        self._with, self._without = _AGES * self._with, _AGES * self._without
        return False

    def learn(self, seconds: float, plain: float, loss: float, trees: int) -> None:
        """All drafted for, a round would take so many seconds, and plain decoding, for its tokens, `plain`; loss: plain
        rounds that could have been run in the time that this one loses; trees: that say so."""
        # What is lost while it is thought to pay ends by itself, and leaves no debt.
        least = min(self._credit, 0.0) if self.pays else -math.inf
        self._credit = min(max(self._credit - loss, least), _EARNED)
        newest = min(1.0, _NEWEST * math.sqrt(trees))
        self._with += newest * (seconds - self._with)
        self._without += newest * (plain - self._without)
        self.pays = self._without > (1.0 if self.pays else _ENTERS) * self._with
        if self.pays:  # who paid only just is looked at again late
            self._pause = max(1, self._pause - 1)
        elif plain <= _ENTERS * seconds:  # what looks well by itself is looked at again soon,
            longest = min(max(1, math.ceil(loss / _TRIALS)), self.LONGEST)  # and so is what costs little to look at
            self._pause = min(2 * self._pause, longest)
        self._left = self._pause


class _Hope(NamedTuple):
    """What was expected of a round with drafts: `more` tokens beside its `seqs` ones, in the time of `spent` plain
    rounds; and of one in which all are drafted for: tokens of so many plain rounds more, in the time of so many."""

    pauses: Pauses
    seqs: int
    more: float
    spent: float
    all_more: float
    all_spent: float


class Policy:
    """Decides the widths of rounds, and learns from what they took and brought. Rounds with more than their trees, such
    as chunks of prompts, are not learned from.

    rounds, drafting: what they cost; drafting by the sequences that are drafted for.
    """

    def __init__(self, rounds: Costs, drafting: Costs) -> None:
        self.rounds, self.drafting = rounds, drafting
        self.calibration = Calibration()
        self._pauses: dict[int, Pauses] = {}  # by sequences
        self.tries = False  # whether the round's draft is a trial
        self._rested = True  # whether the round before had no draft
        self._hope: _Hope
        self._asked = 0

    def drafts(self, asking: int) -> int:
        """For how many of those that ask to draft in this round: all, none, or for a trial the root of their number."""
        size = power(asking)
        if size not in self._pauses:
            self._pauses[size] = Pauses()
        pauses = self._pauses[size]
        drafts = pauses.drafts()
        self.tries, self._rested = drafts and not pauses.pays, not self._asked
        self._asked = (math.isqrt(asking - 1) + 1 if self.tries else asking) if drafts else 0
        return self._asked

    def choose(
        self, trees: Sequence[Grown], asked: int, asking: int, seqs: int, rows: int, context: int, took: float
    ) -> list[int]:
        """How many nodes below its root each drafted tree is cut to.

        asked, asking: sequences that were drafted for, of those that could be; seqs: all that get a token in this
        round; rows: of the round without nodes below a root, so with chunks of prompts; context: of the longest; took:
        seconds, of the draft.
        """
        worth = [self.calibration.worth(grown.scores[1:]) for grown in trees]
        pauses, share = self._pauses[power(asking)], asking / asked
        steps = self._steps(seqs, rows, math.ceil(share * sum(map(len, worth))), context)
        usual = self.drafting.seconds(asked, asked, context)
        chosen = every = allot(worth, steps, seqs, usual, 0 if pauses.pays else _TRIED)
        alone = float(seqs)
        if not pauses.pays:  # what all would bring, if their trees were like those of the few
            alone, before = seqs / share, self.drafting.seconds(asking, asking, context)
            every = allot(worth, [(int(n / share), took) for n, took in steps], alone, before)
        plain = steps[0][1]
        # A draft after plain rounds took longer than one of many: what they left behind came first.
        spent = chosen.seconds + min(took - usual, _HICCUP * plain)
        self._hope = _Hope(
            pauses, seqs, chosen.tokens - seqs, spent / plain, every.tokens / alone - 1.0, every.seconds / plain
        )
        return chosen.sizes

    def _steps(self, seqs: int, rows: int, most: int, context: int) -> list[tuple[int, float]]:
        """What a round takes, by the most nodes that it has: more need no less, what is measured otherwise is
        chance. But for what a chunk takes: some round must run it, with drafts or without."""
        sizes = [self.rounds.padded(rows)]
        while sizes[-1] < rows + most:
            sizes.append(self.rounds.padded(sizes[-1] + 1))
        took = list(itertools.accumulate(reversed(self.rounds.table(seqs, context, sizes)), min))
        least = took[-1]
        alone = min(least, self.rounds.seconds(seqs, seqs, context)) if rows > seqs else least
        return [(size - rows, alone + (each - least)) for size, each in zip(sizes, reversed(took), strict=True)]

    def learn(self, seqs: int, rows: int, context: int, seconds: float) -> None:
        """What a round of so many sequences and rows took, but for its draft."""
        self.rounds.learn(seqs, rows, context, seconds)

    def learn_draft(self, asked: int, context: int, seconds: float, accepted: int) -> None:
        """What the draft that `choose` was asked for took, its trees too, and how many nodes were accepted.

        After plain rounds that is more than it usually takes, see `choose`, so then it is learned from only if it is
        clearly less than was thought. Whether drafting pays follows what comes: what scores are worth is learned more
        slowly.
        """
        hope = self._hope
        came = (accepted + _LITTLE) / (hope.more + _LITTLE)
        loss = hope.spent - 1.0 - accepted / hope.seqs
        hope.pauses.learn(hope.all_spent, 1.0 + came * hope.all_more, loss, asked)
        if not self._rested or seconds < _CLEARLY * self.drafting.seconds(asked, asked, context):
            self.drafting.learn(asked, asked, context, seconds)
        else:
            self.drafting.meet(asked, context)

    def learn_tree(self, grown: Grown, accepted: Collection[int]) -> None:
        """What became of a tree that was verified."""
        self.calibration.learn(grown.scores, accepted)
