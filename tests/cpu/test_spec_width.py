"""spec.width: the best of all widths, whatever times look like; what is learned; never a loss for long."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.config import DrafterConfig, EngineConfig
from kdtp.engine.plan import plan
from kdtp.proposals import Grown
from kdtp.spec.costs import Costs
from kdtp.spec.width import Calibration, Pauses, Policy, allot
from kdtp.types import ROOT, Tree
from scripts.bench_width import CPU, MACHINES, automatic, fixed, padded, parse, results, texts
from scripts.width_drafts import DEPTH, TEXTS, recorded, synthetic
from scripts.width_drafts import rounds as drawn_from
from tests.dflash import drafter_folder
from tests.dflash_cases import V1
from tests.paths import TINY

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)
CHANCES = st.sampled_from((1.0, 0.9, 0.6, 0.6, 0.3, 0.1, 0.01, 0.0))


@st.composite
def rounds(draw):
    worth = [sorted(draw(st.lists(CHANCES, max_size=4)), reverse=True) for _ in range(draw(st.integers(1, 3)))]
    count = 1 + sum(map(len, worth))
    times = draw(st.lists(st.floats(0.1, 5.0), min_size=count, max_size=count))
    return worth, times, draw(st.sampled_from((0.0, 0.3, 2.0)))


@PROPERTY
@given(rounds())
def test_the_best_of_all_widths_of_all_sequences(case):
    worth, times, before = case
    sizes, tokens, seconds = allot(worth, list(enumerate(times)), len(worth), before)
    rate = tokens / seconds

    def rate_of(each):
        gained = len(worth) + sum(sum(values[:n]) for values, n in zip(worth, each, strict=True))
        return gained / (before + times[sum(each)])

    best = max(map(rate_of, itertools.product(*(range(len(values) + 1) for values in worth))))
    assert rate == pytest.approx(best) and rate_of(sizes) == pytest.approx(best)
    plain = len(worth) / (before + times[0])
    assert rate >= plain


@PROPERTY
@given(rounds(), st.integers(0, 6))
def test_a_least_number_of_nodes(case, least):
    worth, times, before = case
    steps = list(enumerate(times))
    sizes = allot(worth, steps, len(worth), before, least).sizes
    assert sum(sizes) >= min(least, sum(map(len, worth)))
    free = allot(worth, steps, len(worth), before)
    if sum(free.sizes) >= least:
        assert allot(worth, steps, len(worth), before, least) == free


@PROPERTY
@given(rounds(), st.data())
def test_widths_of_one_price_are_looked_at_together(case, data):
    """A step of many widths gives what it does when each is named: of those that cost the same, the widest."""
    worth, times, before = case
    most = len(times) - 1
    ends = [n for n in range(most) if data.draw(st.booleans())] + [most + 2]
    steps = [(end, times[i]) for i, end in enumerate(ends)]
    each = [(n, next(took for end, took in steps if end >= n)) for n in range(len(times))]
    found, want = allot(worth, steps, len(worth), before), allot(worth, each, len(worth), before)
    assert (found.tokens / found.seconds) == pytest.approx(want.tokens / want.seconds)
    assert sum(found.sizes) in [min(end, most) for end in ends]


def test_a_poor_middle_is_climbed_over():
    """One node does not pay, nor do two or three; four do, as they cost no more than one."""
    assert allot([[0.8] * 4], [(0, 1.0), (4, 2.0)], 1.0)[0] == [4]
    assert allot([[0.8] * 4], list(enumerate((1.0, 2.0, 3.0, 4.0, 5.0))), 1.0)[0] == [0]


def test_the_best_nodes_come_first_whosever_they_are():
    worth = [[0.9, 0.5, 0.1], [0.7, 0.6], [0.2]]
    assert allot(worth, [(4, 1.0), (6, 100.0)], 3.0)[0] == [2, 2, 0]


def a_chain(scores):
    n = len(scores)
    return Grown(Tree(tuple(range(n)), (ROOT, *range(n - 1))), scores)


def test_an_unknown_drafter_is_taken_at_its_word():
    grown = a_chain([0.0, -0.5, -1.25])
    found = Calibration().worth(grown.scores)
    assert found == pytest.approx([1.0, math.exp(-0.5), math.exp(-1.25)])


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.6])
def test_what_scores_are_worth_is_learned(factor):
    """The truth is `factor` times what the drafter says: at the first depth, and what follows is as it says."""
    rng, calibration = random.Random(1), Calibration()
    claimed = [0.0, math.log(0.55), math.log(0.55 * 0.8)]
    grown = a_chain(claimed)
    for _ in range(2000):
        first = rng.random() < 0.55 * factor
        path = {0, *([1] if first else []), *([2] if first and rng.random() < 0.8 else [])}
        calibration.learn(grown.scores, path)
    found = calibration.worth(grown.scores)
    assert found == pytest.approx([1.0, 0.55 * factor, 0.55 * 0.8 * factor], rel=0.15)
    unseen = -6.0, -9.0, -99.0
    assert calibration.worth(unseen) == pytest.approx([math.exp(s) * factor for s in unseen], rel=0.15)


def test_a_drafter_that_says_too_little_is_given_wider_trees():
    """It says half of what it is right: nodes that its first ones would make look dear are tried, and kept."""
    rounds = Costs({1: 1.0, 201: 3.0}, int)
    policy, rng = Policy(rounds, Costs({1: 0.2}, int, rounds)), random.Random(4)
    tree, nodes = a_chain([n * math.log(0.5) for n in range(8)]), []
    for _ in range(400):
        sizes = []
        if asked := policy.drafts(8):
            sizes = policy.choose([tree] * asked, asked, 8, 8, 8, 0, 0.2)
            paths = [next((n for n in range(size) if rng.random() > 0.85), size) for size in sizes]
            policy.learn_draft(asked, 0, 0.2, sum(paths))
            for size, path in zip(sizes, paths, strict=True):
                policy.learn_tree(tree.cut(size), range(path + 1))
        rows = 8 + sum(sizes)
        policy.learn(8, rows, 0, rounds._base(rows))
        nodes.append(sum(sizes))
    assert sum(nodes[-100:]) / 800 > 5.0  # not 3


def test_what_is_never_right_is_worth_little():
    calibration = Calibration()
    for _ in range(50):
        calibration.learn([0.0, math.log(0.9), math.log(0.8)], {0})
    assert max(calibration.worth([math.log(0.9), math.log(0.8)])) < 0.1


def test_times_between_and_beyond_what_was_measured():
    costs = Costs({1: 1.0, 9: 3.0, 17: 4.0}, lambda rows: rows)
    assert [costs.seconds(1, rows, 0) for rows in (1, 5, 9, 13, 17, 33)] == [1.0, 2.0, 3.0, 3.5, 4.0, 6.0]
    assert Costs({4: 2.0}, lambda rows: rows).seconds(1, 40, 0) == 2.0
    stepped = Costs({1: 1.0, 8: 2.0}, lambda rows: 1 if rows == 1 else 8)
    assert [stepped.seconds(1, rows, 0) for rows in (1, 2, 8)] == [1.0, 2.0, 2.0]


def test_times_follow_what_is_measured_now():
    costs = Costs({1: 1.0, 9: 3.0}, lambda rows: rows)
    costs.learn(1, 9, 0, 90.0)  # the first of a shape took a capture
    assert costs.seconds(1, 9, 0) < 4.0
    for _ in range(12):
        costs.learn(1, 9, 0, 6.0)
    assert costs.seconds(1, 9, 0) == pytest.approx(6.0, rel=0.05)
    assert costs.seconds(1, 1, 0) == pytest.approx(2.0, rel=0.05)  # all is twice as slow, as far as is known
    for _ in range(12):
        costs.learn(1, 9, 5000, 12.0)
    assert costs.seconds(1, 1, 5000) == pytest.approx(4.0, rel=0.05)
    assert costs.seconds(1, 1, 40000) == costs.seconds(1, 1, 5000)  # the nearest that is known
    for _ in range(1100):
        costs.learn(1, 1, 0, 1.0)
    assert costs.seconds(1, 9, 0) == pytest.approx(3.0, rel=0.05)  # what was measured long ago is forgotten


def test_what_was_not_tried_is_taken_for_the_less_of_two_guesses():
    """As many times the curve, or as many seconds more; if it is less than the curve, as many times."""
    for took, others in ((8.0, [2.0, 14.0]), (2.0, [0.5, 5.0])):
        costs = Costs({1: 1.0, 8: 4.0, 64: 10.0}, lambda rows: rows)
        for _ in range(12):
            costs.learn(1, 8, 0, took)
        assert costs.seconds(1, 8, 0) == pytest.approx(took)
        assert [costs.seconds(1, rows, 0) for rows in (1, 64)] == pytest.approx(others)


def test_a_slow_while_does_not_make_one_width_dearer_than_another():
    """Another program runs now and then, by chance mostly when 9 rows are run: they do not look dearer for long."""
    costs = Costs({1: 1.0, 9: 3.0}, lambda rows: rows)
    for slow in (1.0, 2.5) * 6:
        for i in range(16):
            rows = 9 if (i % 4 > 0) == (slow > 1.0) else 1
            costs.learn(1, rows, 0, slow * (3.0 if rows == 9 else 1.0))
    assert 2.0 < costs.seconds(1, 9, 0) / costs.seconds(1, 1, 0) < 4.0
    assert costs.pace == pytest.approx(2.5, rel=0.2)


def test_the_pace_does_not_wander():
    """Thousands of rounds of one kind, some with a hiccup: what is not run meanwhile looks as dear as before."""
    rng, costs = random.Random(2), Costs({1: 1.0, 9: 3.0}, int)
    drafts = Costs({1: 0.5}, int, costs)
    for _ in range(3000):
        hiccup = 0.5 if rng.random() < 0.05 else 0.0
        costs.learn(1, 1, 0, 1.0 + 0.05 * rng.expovariate(1.0) + hiccup)
    assert drafts.seconds(1, 1, 0) == pytest.approx(0.5, rel=0.1)
    assert costs.seconds(1, 9, 0) == pytest.approx(3.1, rel=0.1)


def test_what_another_kind_of_round_takes_is_no_matter_of_pace():
    """With more sequences all takes twice what the curve says: that does not make drafts dearer."""
    costs = Costs({1: 1.0, 64: 3.0}, int)
    drafts = Costs({1: 0.5}, int, costs)
    for seqs in (1, 8, 32):
        for _ in range(20):
            costs.learn(seqs, seqs, 0, 2.0 * costs._base(seqs) * (seqs > 1 or 0.5))
        assert drafts.seconds(1, 1, 0) == pytest.approx(0.5)
        assert costs.seconds(seqs, seqs, 0) == pytest.approx(costs._base(seqs) * (2.0 if seqs > 1 else 1.0))


def test_a_curve_rises_whatever_was_measured():
    costs = Costs({1: 1.0, 9: 5.0, 17: 3.0, 33: 4.0}, lambda rows: rows)
    assert [costs.seconds(1, rows, 0) for rows in (1, 9, 17, 33)] == [1.0, 3.0, 3.0, 4.0]


def told(pauses, gain, rounds, loss=0.5):
    """Which of so many rounds drafted; each says that a round of drafts is worth `gain()` of plain ones."""
    drafted = []
    for _ in range(rounds):
        drafted.append(pauses.drafts())
        if drafted[-1]:
            found = gain()
            pauses.learn(1.0, found, 1.0 - found if pauses.pays else loss, 16)
    return drafted


def test_pauses_grow_and_end():
    pauses = Pauses()
    drafted = told(pauses, lambda: 0.7, 1000)
    first = [i for i, yes in enumerate(drafted) if yes]
    assert first[:5] == [4, 7, 12, 21, 38] and len(first) < 25 and any(drafted[-Pauses.LONGEST - 1 :])
    drafted = told(pauses, lambda: 1.5, 300)
    assert sum(drafted) > 150  # once it pays, no more pauses, but now and then a round, to know what it takes
    plain = [i for i, yes in enumerate(drafted[-150:]) if not yes]
    assert len(plain) in (3, 4) and {b - a for a, b in itertools.pairwise(plain)} == {40}


def test_what_trials_cost_is_bounded():
    """However dear a trial is: a few rounds at first, then a fiftieth of the time."""
    for loss in (0.1, 1.0, 3.0, 30.0):
        spent = loss * sum(told(Pauses(), lambda: 0.2, 4000, loss))
        assert spent <= 4.0 + 0.02 * 4000 + loss


def test_what_costs_little_to_try_is_tried_often():
    drafted = {loss: sum(told(Pauses(), lambda: 0.9, 2000, loss)) for loss in (0.0, 0.1, 0.3, 3.0)}
    assert drafted[0.0] == 998 and 160 < drafted[0.1] < 200 and 60 < drafted[0.3] < 75 and drafted[3.0] < 16


def test_what_is_about_even_does_not_change_all_the_time():
    """Noise of a quarter around what makes no difference, or a little one."""
    rng = random.Random(3)
    for mean, most in ((0.85, 15), (1.0, 90), (1.25, 15)):
        pauses, pays = Pauses(), []
        for _ in range(1000):
            told(pauses, lambda mean=mean: rng.uniform(mean - 0.25, mean + 0.25), 1, 0.1)
            pays.append(pauses.pays)
        assert sum(a != b for a, b in itertools.pairwise(pays)) <= most, mean
        assert mean == 1.0 or sum(pays) / 1000 == pytest.approx(float(mean > 1.0), abs=0.1)


def test_a_policy_that_never_drafts_twice_what_does_not_pay():
    """A useless drafter costs its draft once in many rounds, and a useful one is found again."""
    rounds = Costs({1: 1.0, 8: 3.0}, padded)
    policy, rng = Policy(rounds, Costs({1: 0.2}, int, rounds)), random.Random(0)
    grown = a_chain([0.0, math.log(0.9), math.log(0.8)])

    def share(accepted, count):
        nodes = 0
        for _ in range(count):
            if not policy.drafts(1):
                policy.learn(1, 1, 0, 1.0)
                continue
            (size,) = policy.choose([grown], 1, 1, 1, 1, 0, 0.2)
            path = {node for node in range(size + 1) if rng.random() < accepted or not node}
            policy.learn_draft(1, 0, 0.2, len(path) - 1)
            policy.learn(1, 1 + size, 0, 1.0 + 0.3 * size)
            policy.learn_tree(grown.cut(size), path)
            nodes += size
        return nodes / count

    assert share(0.0, 50) < 0.6 and share(0.0, 500) < 0.1
    assert share(1.0, 1500) > 0.5 and share(1.0, 200) == 2.0 * 195 / 200


def until_drafts(policy, asking):
    """For how many, after plain rounds."""
    return next(filter(None, (policy.drafts(asking) for _ in range(70))))


def test_a_trial_is_of_few_and_says_what_all_would_bring():
    """Of 30 that ask 6 are drafted for; what pays for all is seen, though it does not pay for these."""
    rounds = Costs({1: 1.0, 64: 1.0}, int)
    policy = Policy(rounds, Costs({1: 1.0}, int, rounds))  # a draft costs a round, for however many
    assert until_drafts(policy, 30) == 6
    sizes = policy.choose([a_chain([0.0, -0.1])] * 6, 6, 30, 30, 30, 0, 1.0)
    policy.learn_draft(6, 0, 1.0, 5)
    assert sizes == [1] * 6 and policy.drafts(30) == 0  # 60 tokens at most in two rounds' time
    policy = Policy(rounds, Costs({1: 0.5}, int, rounds))
    assert until_drafts(policy, 30) == 6
    policy.choose([a_chain([0.0, -0.1])] * 6, 6, 30, 30, 30, 0, 0.5)
    policy.learn_draft(6, 0, 0.5, 5)
    assert policy.drafts(30) == 30


def test_a_chunk_of_a_prompt_takes_its_rows():
    """Up to 8 rows cost little, more cost much: what a chunk has of them no tree can have."""
    rounds = Costs({1: 1.0, 8: 1.1, 16: 9.0}, padded)
    policy = Policy(rounds, Costs({1: 0.01}, int, rounds))
    tree = a_chain([0.0, *(-0.01 * n for n in range(1, 8))])
    assert until_drafts(policy, 1) == 1
    assert [policy.choose([tree], 1, 1, 1, 1 + chunk, 0, 0.01) for chunk in (0, 3, 4)] == [[7], [4], [3]]


def test_what_a_chunk_takes_is_not_held_against_plain_rounds():
    """It would take that in a plain round, too: the same nodes pay, and drafting pays as much."""
    rounds = Costs({1: 1.0, 101: 11.0}, int)
    policy, found = Policy(rounds, Costs({1: 0.1}, int, rounds)), []
    assert until_drafts(policy, 1) == 1
    for chunk in (0, 60):
        found.append((policy.choose([a_chain([0.0, -0.1, -0.2, -3.0])], 1, 1, 1, 1 + chunk, 0, 0.1), policy._hope))
    assert found[0][0] == found[1][0] and found[0][1][1:] == pytest.approx(found[1][1][1:])


def test_a_chunk_that_takes_far_longer_leaves_a_time():
    """So much longer that their difference rounds to nothing: a round's seconds are above 0 all the same."""
    rounds = Costs({1: 1e-9, 64: 1e9}, int)
    policy = Policy(rounds, Costs({1: 1e-9}, int, rounds))
    assert until_drafts(policy, 1) == 1
    assert policy.choose([a_chain([0.0, -0.1])], 1, 1, 1, 65, 0, 1e-9) == [1]
    assert 0.0 < policy._hope.spent < math.inf


@pytest.mark.parametrize("asking", [8, 40])
def test_drafts_that_were_dear_for_a_while_are_made_again(asking):
    """Another program in the drafter's way: trials of few find it gone, and drafts for all do not stay dear."""
    rounds = Costs({1: 1.0, 64: 1.2, 128: 2.0}, int)
    policy, tree = Policy(rounds, Costs({1: 0.2}, int, rounds)), a_chain([0.0, -0.2, -0.4])

    def share(dearer, count):
        """Of the last quarter, rounds in which all are drafted for."""
        drafted = []
        for _ in range(count):
            asked = policy.drafts(asking)
            drafted.append(asked == asking)
            sizes = policy.choose([tree] * asked, asked, asking, asking, asking, 0, 0.2 * dearer) if asked else []
            if asked:
                policy.learn_draft(asked, 0, 0.2 * dearer, sum(sizes) * 3 // 4)
            rows = asking + sum(sizes)
            policy.learn(asking, rows, 0, rounds._base(rows))
        return sum(drafted[-count // 4 :]) / (count // 4)

    assert share(1.0, 200) > 0.9
    assert share(30.0, 200) < 0.1
    assert share(1.0, 2000) > 0.9


def test_a_draft_after_plain_rounds_tells_nothing_of_one_after_another():
    """It takes in what they have left, too: that is a loss of the trial, and no part of what drafts for all cost."""
    rounds = Costs({1: 1.0, 64: 1.0}, int)
    policy = Policy(rounds, Costs({1: 0.2}, int, rounds))
    assert until_drafts(policy, 1) == 1
    policy.choose([a_chain([0.0, -3.0])], 1, 1, 1, 1, 0, 2.0)
    policy.learn_draft(1, 0, 2.0, 0)
    assert policy.drafting.seconds(1, 1, 0) == pytest.approx(0.2)
    pauses = policy._pauses[1]
    assert not pauses.pays and pauses._credit < 2.1  # it lost nearly two rounds
    while not policy.drafts(1):
        pass
    policy.choose([a_chain([0.0, -0.01])], 1, 1, 1, 1, 0, 2.0)
    policy.learn_draft(1, 0, 2.0, 1)
    assert policy.drafting.seconds(1, 1, 0) == pytest.approx(0.2) and pauses.pays
    policy._rested = True
    for _ in range(10):
        policy.learn_draft(1, 0, 0.19, 1)  # may be chance
    assert policy.drafting.seconds(1, 1, 0) == pytest.approx(0.2)
    for _ in range(10):
        policy.learn_draft(1, 0, 0.1, 1)  # less than was thought even so
    assert policy.drafting.seconds(1, 1, 0) <= 0.1 / 0.8
    for _ in range(20):  # now they come one after another
        assert policy.drafts(1) == 1
        policy.choose([a_chain([0.0, -0.01])], 1, 1, 1, 1, 0, 0.4)
        policy.learn_draft(1, 0, 0.4, 1)
    assert policy.drafting.seconds(1, 1, 0) == pytest.approx(0.4)


def test_what_comes_counts_not_what_scores_promise():
    """After long good text a drafter is as sure as before, and always wrong: that is seen in a few rounds, and in a
    few more it is known."""
    rounds = Costs({1: 1.0, 8: 1.2}, padded)
    policy, grown = Policy(rounds, Costs({1: 0.3}, int, rounds)), a_chain([0.0, -0.1, -0.2, -0.3])

    def drafted(accepted, count):
        many = 0
        for _ in range(count):
            size = 0
            if policy.drafts(1):
                (size,) = policy.choose([grown], 1, 1, 1, 1, 0, 0.3)
                path = range(min(accepted, size) + 1)
                policy.learn_draft(1, 0, 0.3, len(path) - 1)
                policy.learn_tree(grown.cut(size), path)
                many += 1
            policy.learn(1, 1 + size, 0, 1.2 if size else 1.0)
        return many

    assert drafted(3, 300) > 285
    assert drafted(0, 100) < 50
    assert drafted(3, 300) > 200


def test_a_proposal_of_nothing_is_a_round_that_did_not_pay():
    rounds = Costs({1: 1.0}, int)
    policy, drafted = Policy(rounds, Costs({1: 0.1}, int, rounds)), 0
    for _ in range(200):
        if policy.drafts(1):
            drafted += 1
            assert policy.choose([], 1, 1, 1, 1, 0, 0.1) == []
            policy.learn_draft(1, 0, 0.1, 0)
    assert drafted < 25  # a tenth of a round each


@settings(deadline=None, derandomize=True, max_examples=15)
@given(
    st.lists(st.floats(0.0, 1.5), min_size=11, max_size=11),
    st.floats(0.0, 1.0),
    st.lists(st.floats(-3.0, -0.01), min_size=1, max_size=7),
)
def test_a_useless_drafter_costs_no_more_than_trying(steps, draft, claims):
    """Whatever widths cost (1 for one row, and any amount more for more), whatever the drafter claims: nothing it
    proposes is ever right. To learn that takes some rounds; then it is tried once in 64, or more often for little."""
    sizes = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
    curve = dict(zip(sizes, itertools.accumulate(steps, initial=1.0), strict=False))
    rounds = Costs(curve, padded)
    policy, count, spent = Policy(rounds, Costs({1: max(draft, 1e-6)}, int, rounds)), 800, 0.0
    grown = a_chain([0.0, *itertools.accumulate(claims)])
    for _ in range(count):
        size, took = 0, 0.0
        if policy.drafts(1):
            (size,) = policy.choose([grown], 1, 1, 1, 1, 0, draft)
            policy.learn_draft(1, 0, max(draft, 1e-6), 0)
            policy.learn_tree(grown.cut(size), {0})
            took = draft
        policy.learn(1, 1 + size, 0, curve[padded(1 + size)])
        spent += took + curve[padded(1 + size)]
    worst = draft + curve[padded(1 + len(claims))] - 1.0  # what a try costs, at most
    assert spent <= 1.02 * count + 60 * worst


def test_it_loses_nowhere_for_long_and_finds_the_best_width():
    """Simulated machines and texts: against plain decoding and every fixed width, with noise, from nothing known."""
    found = []
    for batch in (1, 4):
        for name, drawn, rng in texts(parse(["--rounds", "250"]), batch):
            if name in ("code", "prose, too sure", "noise"):
                found += results(MACHINES[::2], name, drawn, rng)
    for result in found:
        assert result.auto >= 0.93 * result.plain, result
        assert result.auto >= 0.9 * result.best, result
    assert len(found) == 18 and max(r.auto / r.plain for r in found) > 1.5
    assert sum(r.auto / r.best for r in found) / len(found) > 0.97


@pytest.mark.parametrize("batch", [8, 32, 64])
def test_with_many_streams_on_a_cpu_it_is_plain_decoding(batch):
    """Drafts for all cost more than they bring there, whatever the text: little is spent on finding that out."""
    for name, drawn, rng in texts(parse(["--rounds", "200"]), batch):
        if batch == 8 and name == "code":
            continue  # the one that about pays
        (result,) = results([CPU], name, drawn, rng)
        assert all(rate < result.plain for rate in result.budgets.values()), result
        assert result.auto >= 0.95 * result.plain and result.nodes < 0.2, result


def test_many_streams_whose_text_changes():
    """Drafting does not pay, then does, then does not: each is seen in time."""
    rng = random.Random(5)
    parts = [[synthetic(text, rng) for _ in range(200)] for text in (TEXTS[-1], TEXTS[0], TEXTS[-1])]
    drawn = [batch for drafts in parts for batch in drawn_from(drafts, 16, 200, rng)]
    auto, nodes = automatic(MACHINES[2], drawn, rng)
    assert auto > 1.05 * fixed(MACHINES[2], drawn, 0) and 0.5 < nodes < 2.0


def test_drafts_of_an_engine_are_recorded_with_what_came():
    golden = plan(EngineConfig(str(TINY))).golden
    drafter = DrafterConfig("oracle", block=DEPTH + 1, budget=7, hit=(1.0, 1.0, 0.0))  # knows two tokens of seven
    found = recorded(EngineConfig(str(TINY), drafter=drafter), [golden.prompt], 24)
    assert len(found) == 6 and all(d.path == [1, 2] for d in found)
    assert [d.tokens(nodes) for d in found[:2] for nodes in (0, 1, 2, 63)] == [1, 2, 3, 3] * 2


def test_a_model_and_its_drafter_in_place_of_synthetic_texts(tmp_path):
    folder = drafter_folder(tmp_path / "drafter", V1, plan(EngineConfig(str(TINY))).model)
    text = tmp_path / "text"
    text.write_text("def f(x):\n    return x\n" * 20)
    where = ("--model", TINY, "--drafter-model", folder, "--tokenizer", TINY.parent / "tiny_text", "--text", text)
    chosen = parse([*map(str, where), "--prompts", "3", "--tokens", "12", "--rounds", "5"])
    ((name, drawn, _),) = texts(chosen, 2)
    assert name == "text" and len(drawn) == 5 and all(len(batch) == 2 for batch in drawn)
    assert all(len(d.grown.tree) > 7 for batch in drawn for d in batch)


def test_flags_that_go_together(capsys):
    with pytest.raises(SystemExit):
        parse(["--model", "x"])
    assert "--drafter-model and --text go together" in capsys.readouterr().err
