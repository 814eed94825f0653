"""spec.pick: one argmax rule, published Philox vectors, the sampled law, and one text for every way of decoding."""

import math
import random

import numpy as np
import pytest
import torch
from msgspec import structs

from kdtp.proposals import Trie
from kdtp.spec import accept, mask, pick, tree
from kdtp.types import NO_TOKEN, ROOT, Rule, Tree

INF, NAN = math.inf, math.nan
LAWS = [
    Rule(temperature=1.0),
    Rule(temperature=0.7),
    Rule(temperature=1.8, top_k=5),
    Rule(temperature=1.0, top_p=0.8),
    Rule(temperature=1.3, min_p=0.1),
    Rule(temperature=1.5, top_k=9, top_p=0.9, min_p=0.05),
    Rule(temperature=1.0, top_k=1),
    Rule(temperature=0.5, top_p=1e-9),
    Rule(temperature=2.0, top_k=1000, top_p=0.999999),
]


def test_argmax_takes_the_lowest_id_among_equals():
    rows = torch.tensor([[1.0, 3.0, 3.0, 3.0], [-0.0, 0.0, -0.0, 0.0], [-INF, -2.0, -2.0, -INF], [5.0, 5.0, 1.0, 5.0]])
    assert pick.argmax(rows).tolist() == [1, 0, 1, 0]
    rng = np.random.default_rng(0)
    for size in (1, 2, 15, 16, 17, 255, 1000, 4099):
        values = rng.integers(-3, 3, (40, size)).astype(np.float32)
        assert pick.argmax(torch.from_numpy(values)).tolist() == values.argmax(1).tolist()
        assert pick.argmax(torch.from_numpy(values).bfloat16()).tolist() == values.argmax(1).tolist()
    assert pick.argmax(torch.zeros(0, 5)).tolist() == []


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_row_without_a_finite_maximum_has_no_token(bad):
    """Of every rule, and without an effect on the rows around it."""
    rules = [rule for rule in (Rule(), *LAWS) for _ in range(2)]
    rows = torch.randn(len(rules), 9, generator=torch.Generator().manual_seed(0))
    want = pick.sample(rows, range(len(rules)), rules)
    want[::2] = NO_TOKEN
    for place in (0, 5, slice(None)):
        if place == slice(None) or bad != -INF:
            spoilt = rows.clone()
            spoilt[::2, place] = bad
            assert torch.equal(pick.sample(spoilt, range(len(rules)), rules), want)


def test_a_temperature_too_small_for_float32_has_no_token():
    rows = torch.tensor([[1.0, 2.0], [1e3, 2e3]])
    assert pick.sample(rows, [0, 0], [Rule(temperature=1e-37), Rule(temperature=1e-37)]).tolist() == [1, NO_TOKEN]
    assert pick.sample(rows, [0, 0], [Rule(temperature=1e-50)] * 2).tolist() == [NO_TOKEN] * 2


def test_merged_shards_are_the_argmax():
    rng = np.random.default_rng(1)
    for shards in (1, 2, 3, 8):
        for vocab in (1, 2, 16, 100):
            width = -(-vocab // shards)
            padded = np.full((20, shards * width), -np.inf, np.float32)
            padded[:, :vocab] = rng.integers(-2, 2, (20, vocab))
            parts = np.split(padded, shards, axis=1)
            local = [pick.local_argmax(torch.from_numpy(part), n * width) for n, part in enumerate(parts)]
            values, ids = torch.stack([v for v, _ in local]), torch.stack([i for _, i in local])
            assert pick.merge_argmax(values, ids).tolist() == padded.argmax(1).tolist()
            order = rng.permutation(shards)  # the order of the shards decides nothing
            assert pick.merge_argmax(values[order], ids[order]).tolist() == padded.argmax(1).tolist()
    values[2, 7] = NAN
    assert pick.merge_argmax(values, ids)[7] == NO_TOKEN


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [  # kat_vectors of Random123, philox4x32 10
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_vectors(counter, key, want):
    got = pick.philox(tuple(torch.tensor([word]) for word in counter), tuple(torch.tensor([word]) for word in key))
    assert [int(word) for word in got] == want


def test_noise_is_keyed_by_seed_position_and_token():
    first = [-math.log(-math.log((x + 0.5) / 2**32)) for x in (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)]
    assert pick.gumbel(0, 0, 4).tolist() == [float(np.float32(g)) for g in first]
    long = pick.gumbel(5, 17, 1000)
    assert long.dtype == torch.float32 and torch.equal(pick.gumbel(5, 17, 7), long[:7])
    seeds = [0, 1, -1, 1 << 32, -(1 << 63), (1 << 63) - 1]
    places = [0, 1, (1 << 32) - 1, 1 << 32, (1 << 40) + 3]
    noise = {(s, p): tuple(pick.gumbel(s, p, 5).tolist()) for s in seeds for p in places}
    assert len(set(noise.values())) == len(noise)
    assert torch.equal(pick.gumbel(-1, 3, 9), pick.gumbel((1 << 64) - 1, 3, 9))


def kept_law(logits: np.ndarray, rule: Rule) -> np.ndarray:
    """The law of a rule by its definition, one filter after the other, in plain loops."""
    scaled = (logits / np.float32(rule.temperature)).astype(np.float64)
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))

    def law(ids: list[int]) -> dict[int, float]:
        total = sum(math.exp(scaled[i] - scaled[ids[0]]) for i in ids)
        return {i: math.exp(scaled[i] - scaled[ids[0]]) / total for i in ids}

    if rule.top_k:
        order = order[: rule.top_k]
    if rule.top_p < 1:
        probs, mass, nucleus = law(order), 0.0, []
        while mass < rule.top_p and len(nucleus) < len(order):
            nucleus.append(order[len(nucleus)])
            mass += probs[nucleus[-1]]
        order = nucleus
    probs = law(order)
    probs = law([i for i in order if probs[i] >= rule.min_p * probs[order[0]]])
    return np.array([probs.get(i, 0.0) for i in range(len(scaled))])


def chi_square(counts: np.ndarray, law: np.ndarray) -> float:
    """In units of the 99.9 % quantile (Wilson-Hilferty), so that above 1 is a rejection."""
    seen = law > 0
    assert counts[~seen].sum() == 0, "a token that the filters drop was drawn"
    df = int(seen.sum()) - 1
    if df == 0:
        return 0.0
    want = law[seen] * counts.sum()
    return float(
        ((counts[seen] - want) ** 2 / want).sum() / (df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3)
    )


@pytest.mark.parametrize("rule", LAWS)
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_law_of_sampling(rule, along):
    """20,000 draws from one distribution of 12 tokens, over positions of one seed and over seeds at one position."""
    logits = np.random.default_rng(7).standard_normal(12).astype(np.float32) * 1.5
    logits[3] = logits[8]  # a tie
    draws = 20_000
    places = list(range(draws)) if along == "positions" else [11] * draws
    seeds = [123] * draws if along == "positions" else list(range(-draws // 2, draws // 2))
    rules = [structs.replace(rule, seed=seed) for seed in seeds]
    ids = pick.sample(torch.from_numpy(logits).expand(draws, 12), places, rules)
    counts = np.bincount(ids.numpy(), minlength=12)
    assert chi_square(counts, kept_law(logits, rule)) < 1
    if rule.top_k == 0 and rule.top_p == 1:  # the test can tell a temperature that is a tenth off
        assert chi_square(counts, kept_law(logits, Rule(temperature=rule.temperature * 1.1, min_p=rule.min_p))) > 1


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Rule(temperature=1.0), {1, 2, 4, 5, 7}),
        (Rule(temperature=1.0, top_k=3), {1, 2, 4}),  # among equals the lower ids
        (Rule(temperature=1.0, top_k=2**31 - 1), {1, 2, 4, 5, 7}),
        (Rule(temperature=1.0, top_k=4, top_p=0.5), {1, 2}),  # half of what top_k kept is reached exactly
        (Rule(temperature=1.0, top_k=4, top_p=0.51), {1, 2, 4}),
        (Rule(temperature=1.0, top_p=0.5), {1, 2, 4}),  # 2 / (4 + 1/8) is not a half
        (Rule(temperature=1.0, min_p=0.12), {1, 2, 4, 5, 7}),
        (Rule(temperature=1.0, min_p=0.13), {1, 2, 4, 5}),
        (Rule(temperature=0.5, min_p=0.12), {1, 2, 4, 5}),  # filters see the temperature
        (Rule(temperature=1.0, top_k=1, top_p=0.1, min_p=0.9), {1}),
    ],
)
def test_kept_sets(rule, kept):
    """Weights 1 for ids 1, 2, 4, 5, an eighth for 7; the others are masked. A greedy row stands between."""
    logits = torch.full((8,), -INF)
    logits[[1, 2, 4, 5]], logits[7] = 0.0, -math.log(8)
    ids = pick.sample(logits.expand(400, 8), range(400), [rule, Rule()] * 200)
    assert set(ids[::2].tolist()) == kept
    assert set(ids[1::2].tolist()) == {1}


class Target:
    """A random language of 6 tokens: logits that depend on the whole prefix."""

    def __init__(self, seed: int, sharpness: float) -> None:
        self.seed, self.sharpness = seed, sharpness

    def logits(self, prefix: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{self.seed} {prefix}")
        return [self.sharpness * rng.choice((0.0, 0.5, rng.random())) for _ in range(6)]

    def decide(self, prefix: tuple[int, ...], drafted: Tree, rule: Rule) -> list[int]:
        """The target's choice at every node; `prefix` ends with the root."""
        bits = mask.ancestor_bits(drafted.parents)
        texts = [prefix + tuple(drafted.tokens[j] for j in range(1, len(drafted)) if b >> j & 1) for b in bits]
        places = [p + 1 for p in mask.positions(len(prefix) - 1, drafted.parents)]
        return pick.sample(torch.tensor([self.logits(t) for t in texts]), places, [rule] * len(texts)).tolist()


def draft(rng: random.Random, prefix: tuple[int, ...], truth: tuple[int, ...]) -> Trie:
    """A random trie that often, not always, goes where the target will go."""
    tokens, parents, lp, texts = [], [], [], [prefix]
    for _ in range(rng.randint(0, 12)):
        parent = rng.randrange(len(texts))
        text = texts[parent]
        known = text == truth[: len(text)] != truth and rng.random() < 0.6
        token = truth[len(text)] if known else rng.randrange(6)
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
            lp.append(-rng.random())
            texts.append((*text, token))
    return Trie(tokens, parents, lp)


def test_tree_chain_and_plain_decoding_give_one_text():
    """Any tree, any budget, greedy or sampled, with ties: the text is a function of prompt and seed."""
    rng, matched = random.Random(5), 0
    for case in range(150):
        target = Target(case, rng.choice((0.5, 2.0, 6.0)))
        rule = rng.choice(
            (
                Rule(),
                Rule(temperature=0.8, seed=case),
                Rule(temperature=1.2, top_k=4, top_p=0.9, min_p=0.02, seed=-case),
            )
        )
        plain: tuple[int, ...] = (0, 1)
        while len(plain) < 14:
            plain += tuple(target.decide(plain, Tree(plain[-1:], (ROOT,)), rule))
        for build in (tree.chain, tree.build):
            text = plain[:2]
            while len(text) < len(plain):
                drafted = build(draft(rng, text, plain), text[-1], rng.randint(0, 9), 5)
                path = accept.walk(drafted, target.decide(text, drafted, rule))
                text += (*(drafted.tokens[row] for row in path.rows[1:]), path.bonus)
                matched += len(path.rows) - 1
            assert text[: len(plain)] == plain
    assert matched > 1000  # the trees did get accepted


def test_a_row_does_not_depend_on_its_batch():
    rng = np.random.default_rng(9)
    logits = torch.from_numpy(rng.standard_normal((40, 50)).astype(np.float32))
    rules = [LAWS[i % len(LAWS)] if i % 4 else Rule() for i in range(40)]
    places = rng.integers(0, 5, 40).tolist()
    together = pick.sample(logits, places, rules)
    alone = [int(pick.sample(logits[i : i + 1], places[i : i + 1], rules[i : i + 1])) for i in range(40)]
    assert together.tolist() == alone
    assert pick.sample(logits[:0], [], []).tolist() == []
