"""The choice of a token: noise, filters, and the law that sample-and-match on a tree has."""

import dataclasses
import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.accept import walk
from reference.pick import GREEDY, Rule, argmax, choose, gumbel, kept, philox
from reference.tree import Tree


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [
        ([0, 0, 0, 0], 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([0xFFFFFFFF] * 4, 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0_A4093822,
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_known_answers(counter, key, want):
    """The known-answer vectors of Random123."""
    assert " ".join(f"{int(word):08x}" for word in philox(key, counter)) == want


def test_noise_is_keyed_by_seed_position_and_id():
    base = gumbel(5, 9, 102)
    assert base[:50].tobytes() == gumbel(5, 9, 50).tobytes()
    for seed, position in ((6, 9), (5, 10), (5 + 2**32, 9), (5, 9 + 2**32), (-5, 9)):
        assert not np.isin(gumbel(seed, position, 102), base).any()
    words = philox(5, [3, 9, 0, 0])
    uniform = (float(words[2]) + 0.5) / 2**32
    assert base[14] == pytest.approx(-math.log(-math.log(uniform)), rel=1e-6)


def test_argmax():
    assert argmax(np.float32([1, 3, 3, -np.inf])) == 1
    with pytest.raises(ValueError, match="NaN"):
        argmax(np.float32([1, np.nan]))


def kept_by_definition(scaled, rule):
    """Ids left by the filters, one at a time, in plain Python."""
    ids = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    ids = ids[: rule.top_k or len(ids)]

    def probability(i):
        return math.exp(scaled[i]) / math.fsum(math.exp(scaled[j]) for j in ids)

    if rule.top_p < 1:
        total, count = 0.0, 0
        while total < rule.top_p and count < len(ids):
            total += probability(ids[count])
            count += 1
        ids = ids[:count]
    return {i for i in ids if probability(i) >= rule.min_p * probability(ids[0])}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-12, 4), min_size=1, max_size=12),
    st.integers(0, 14),
    st.sampled_from([1.0, 0.01, 0.3, 0.52, 0.77, 0.99]),
    st.sampled_from([0.0, 0.013, 0.21, 0.9]),
)
def test_filters_are_their_definition(quarters, top_k, top_p, min_p):
    scaled = np.array(quarters, np.float32) / 4  # many ties
    rule = Rule(1.0, top_k, top_p, min_p)
    assert set(np.flatnonzero(kept(scaled, rule))) == kept_by_definition(scaled.tolist(), rule)


def test_each_filter_works_on_what_the_one_before_left():
    scaled = np.log(np.float32([0.4, 0.3, 0.2, 0.1]))
    # Of the two largest alone the first has 0.571: enough for top_p 0.57, which it is not of all four.
    assert kept(scaled, Rule(1.0, top_k=2, top_p=0.57)).tolist() == [True, False, False, False]
    assert kept(scaled, Rule(1.0, top_p=0.57)).tolist() == [True, True, False, False]


def test_top_k_1_keeps_the_lowest_id_of_a_tie():
    logits = np.float32([0, 2, 2, 1])
    assert {choose(logits, at, Rule(1.0, top_k=1, seed=3)) for at in range(50)} == {1}
    assert choose(logits, 0, GREEDY) == 1


@pytest.mark.parametrize("rule", [Rule(1.0), Rule(0.7, top_k=4), Rule(1.5, top_p=0.8), Rule(1.0, min_p=0.2)])
def test_frequencies_are_the_law(rule):
    logits = np.float32([0.5, -1, 1.5, 0, 0.5, -3])
    scaled = logits / np.float32(rule.temperature)
    law = np.where(kept(scaled, rule), np.exp(scaled), 0)
    law /= law.sum()
    draws = 2000
    tokens = [choose(logits, at % 500, dataclasses.replace(rule, seed=at // 500)) for at in range(draws)]
    counts = np.bincount(tokens, minlength=6)
    assert (counts[law == 0] == 0).all()
    spread = np.sqrt(draws * law * (1 - law))
    assert (np.abs(counts - draws * law) <= 4 * spread + 1e-9).all()


def target(prefix):
    """A target's distribution over three tokens after `prefix`, unlike at every prefix."""
    weights = np.random.default_rng([17, *prefix]).random(3) + 0.05
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("tokens", "parents"),
    [
        ((0, 1, 2, 0, 1, 0, 2), (-1, 0, 0, 1, 1, 2, 3)),
        ((0, 0, 1, 2), (-1, 0, 0, 0)),
        ((0, 1, 1, 0, 2), (-1, 0, 1, 2, 3)),
        ((0,), (-1,)),
    ],
    ids=["tree", "star", "chain", "root"],
)
def test_sample_and_match_has_the_targets_law(tokens, parents):
    """Every combination of decisions on the tree, weighed: what comes out is the target's own text."""
    tree = Tree(tokens, parents)
    texts = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        texts.append((*texts[parent], token))
    laws = [target(text) for text in texts]
    emitted, accepted = {}, 0.0
    for ids in product(range(3), repeat=len(tokens)):
        weight = math.prod(law[token] for law, token in zip(laws, ids, strict=True))
        path = walk(tree, ids)
        text = (*texts[path.rows[-1]], path.bonus)
        emitted[text] = emitted.get(text, 0.0) + weight
        accepted += weight * (len(path.rows) - 1)
    mass = {text: math.prod(target(text[:i])[text[i]] for i in range(len(text))) for text in {*emitted, *texts}}
    assert math.fsum(emitted.values()) == pytest.approx(1, abs=1e-12)
    for text, weight in emitted.items():
        assert weight == pytest.approx(mass[text], abs=1e-12)
    # The expected number of accepted nodes is the target's mass of the drafted prefixes.
    assert accepted == pytest.approx(math.fsum(mass[text] for text in texts[1:]), abs=1e-12)
