"""kdtp.spec against reference: one tree, one mask, one walk, one token."""

import random

import numpy as np
import pytest
import torch

import reference.accept
import reference.mask
import reference.pick
import reference.tree
from kdtp.proposals import Conditionals, Marginals, Trie
from kdtp.spec import accept, mask, pick, tree
from kdtp.types import Rule


def random_marginals(rng: np.random.Generator) -> reference.tree.Marginals:
    """Sharp, flat or tied distributions, some with unusable entries."""
    length, width = rng.integers(1, 9), rng.choice([1, 4, 16])
    logits = (rng.standard_normal((length, 60)) * rng.choice([0.1, 1, 5], (length, 1))).astype(np.float32)
    if rng.random() < 0.5:
        logits = np.round(logits)
    got = reference.tree.marginals(logits, int(width))
    if rng.random() < 0.3:
        got.lp[rng.integers(0, length), rng.integers(0, width) :] = rng.choice([np.nan, np.inf, -np.inf])
    return got


def random_trie(rng: random.Random) -> Trie:
    edges: dict[tuple[int, int], float] = {}
    for _ in range(rng.randint(0, 40)):
        score = rng.choice((-0.5, -0.25, 0.0, -1e-8, -4 * rng.random(), -np.inf, np.nan, 1e-7))
        edges.setdefault((rng.randint(0, len(edges)), rng.randint(0, 5)), score)
    return Trie([t for _, t in edges], [p for p, _ in edges], list(edges.values()))


def random_conditionals(rng: np.random.Generator) -> reference.tree.Conditionals:
    """Sharp or tied scores after each token, some of them unusable."""
    length, width = rng.integers(0, 5), rng.choice([1, 3, 6])
    lp = -np.abs(rng.standard_normal((length, width, width)) * rng.choice([0.1, 1, 5])).astype(np.float32)
    if rng.random() < 0.5:
        lp = np.round(lp)
    if length and rng.random() < 0.3:
        at = tuple(rng.integers(0, size) for size in lp.shape)
        lp[at] = rng.choice([np.nan, np.inf, -np.inf])
    ids = np.argsort(rng.standard_normal((length, 40)), axis=1)[:, :width]
    return reference.tree.Conditionals(lp, ids)


@pytest.mark.parametrize("shape", ["build", "chain"])
def test_trees_masks_and_walks(shape):
    rng, choice = np.random.default_rng(0), random.Random(0)
    grow, grow_reference = getattr(tree, shape), getattr(reference.tree, shape)
    for _ in range(250):
        budget, depth = choice.choice((0, 1, 7, 16, 64)), choice.randint(0, 9)
        want_of = random_marginals(rng)
        trie, scored = random_trie(choice), random_conditionals(rng)
        pairs = [
            (Conditionals(torch.from_numpy(scored.lp), torch.from_numpy(scored.ids)), scored),
            (Marginals(torch.from_numpy(want_of.lp), torch.from_numpy(want_of.ids)), want_of),
            (trie, reference.tree.Trie(trie.tokens, trie.parents, trie.lp)),
        ]
        for mine, theirs in pairs:
            got, want = grow(mine, 3, budget, depth), grow_reference(theirs, 3, budget, depth)
            assert (got.tokens, got.parents) == (want.tokens, want.parents)
            assert mask.positions(11, got.parents) == reference.mask.positions(11, want.parents)
            assert np.array_equal(mask.ancestors(got.parents).numpy(), reference.mask.ancestors(want.parents))
            dense = mask.dense(11, got.parents, 11 + len(got)).numpy()
            assert np.array_equal(dense, reference.mask.dense(11, want.parents))
            ids = [choice.choice((*got.tokens, 0)) for _ in got.tokens]
            path = reference.accept.walk(want, ids)
            assert (path.rows, path.bonus) == (accept.walk(got, ids).rows, accept.walk(got, ids).bonus)


def test_noise():
    for seed in (0, 1, -1, 123456789, -(2**63), 2**63 - 1):
        for position in (0, 1, 131071, 2**32 + 5):
            got, want = pick.gumbel(seed, position, 2003).numpy(), reference.pick.gumbel(seed, position, 2003)
            # Two libraries' logarithms may differ in the last bit of a double, hence rarely in that of a float.
            assert np.abs(got - want).max() <= 2e-6 and (got != want).mean() < 1e-3


def test_tokens():
    """3,000 rows, greedy and by every mixture of filters, also with ties and masked entries."""
    rng, choice = np.random.default_rng(1), random.Random(1)
    logits = (rng.standard_normal((3000, 97)) * rng.choice([0.3, 2, 8], (3000, 1))).astype(np.float32)
    logits[::3] = np.round(logits[::3])
    logits[::5, 90:] = -np.inf
    rules = [
        Rule(
            temperature=choice.choice((0.0, 0.3, 1.0, 1.7)),
            top_k=choice.choice((0, 0, 1, 5, 40, 1000)),
            top_p=choice.choice((1.0, 1.0, 0.5, 0.9, 0.999, 1e-6)),
            min_p=choice.choice((0.0, 0.0, 0.05, 0.5)),
            seed=choice.choice((0, -7, choice.getrandbits(62))),
        )
        for _ in range(3000)
    ]
    places = [choice.choice((0, 5, choice.randrange(1 << 20), 1 << 33)) for _ in range(3000)]
    got = pick.sample(torch.from_numpy(logits), places, rules).tolist()
    for token, row, place, rule in zip(got, logits, places, rules, strict=True):
        mirrored = reference.pick.Rule(rule.temperature, rule.top_k, rule.top_p, rule.min_p, rule.seed)
        assert token == reference.pick.choose(row, place, mirrored)
