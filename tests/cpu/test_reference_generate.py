"""Speculation changes how a text is computed and nothing of the text: tree == chain == plain, bit for bit."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cases import MICRO, MICRO_V3, random_model

from reference.drafter import Oracle
from reference.generate import Draft, generate
from reference.model import Model
from reference.pick import GREEDY, Rule, choose
from reference.tree import Trie

PROMPT = (7, 1, 1, 30)
RULES = {"greedy": GREEDY, "sampled": Rule(1.2, top_k=20, top_p=0.95, min_p=0.01, seed=-11)}
MODELS = {"plain": random_model(MICRO), "v3": random_model(MICRO_V3)}


@functools.cache
def plain(model: str, rule: str, max_tokens: int):
    """The text by plain decoding, and the whole text for an oracle."""
    out = generate(MODELS[model], PROMPT, max_tokens, RULES[rule])
    return out, (*PROMPT, *out.tokens)


def assert_same(got, want):
    assert got.tokens == want.tokens and got.reason == want.reason
    assert np.stack(got.logits).tobytes() == np.stack(want.logits).tobytes()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("model", MODELS)
@settings(max_examples=7, deadline=None, derandomize=True)
@given(
    budget=st.sampled_from([0, 1, 2, 3, 5, 8, 13, 21, 33, 64]),
    block=st.integers(1, 9),
    hit=st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=1, max_size=4),
    rank=st.integers(1, 4),
    seed=st.integers(0, 999),
    shape=st.sampled_from(["tree", "tree", "chain"]),
)
def test_any_oracle_gives_the_text_of_plain_decoding(model, rule, budget, block, hit, rank, seed, shape):
    want, text = plain(model, rule, 16)
    oracle = Oracle(text, MODELS[model].config.vocab_size, hit, rank, topk=6, seed=seed)
    got = generate(MODELS[model], PROMPT, 16, RULES[rule], draft=Draft(oracle.propose, block, budget, shape))
    assert_same(got, want)
    assert got.forwards == got.rounds + 1
    # Each round commits its root and what it accepted; the last token of the text is run only if it was accepted.
    assert got.committed == got.rounds + sum(got.accepted_by_depth) and got.committed in (15, 16)
    assert all(a <= d for a, d in zip(got.accepted_by_depth, got.drafted_by_depth, strict=True))


@pytest.mark.parametrize("rule", RULES)
def test_tries_of_parent_dependent_scores(rule):
    """Each trie holds the truth on one branch, wrong tokens elsewhere, and whole wrong branches."""
    want, text = plain("plain", rule, 20)
    random = np.random.default_rng(0)

    def propose(known, depth):
        edges, node = {}, 0
        for token in text[len(known) : len(known) + depth]:
            for other in random.choice(MICRO.vocab_size, 2, replace=False):
                edges[node, int(other)] = -2 * random.random()
            edges[node, token] = -random.random()
            node = list(edges).index((node, token)) + 1
        return Trie([token for _, token in edges], [parent for parent, _ in edges], list(edges.values()))

    got = generate(MODELS["plain"], PROMPT, 20, RULES[rule], draft=Draft(propose, 6, 12))
    assert_same(got, want)
    assert 3 < got.rounds < 19


def test_budget_0_is_plain_decoding():
    want, text = plain("plain", "greedy", 20)
    oracle = Oracle(text, MICRO.vocab_size, [1.0])
    got = generate(MODELS["plain"], PROMPT, 20, draft=Draft(oracle.propose, 8, 0))
    assert_same(got, want)
    assert got.forwards == want.forwards == 20 and got.accepted_by_depth == [0] * 7


def test_a_perfect_oracle_commits_whole_blocks():
    """24 tokens: the prefill's, then 3 rounds of 8, the last of which ends in an accepted node."""
    want, text = plain("plain", "greedy", 24)
    oracle = Oracle(text, MICRO.vocab_size, [1.0])
    got = generate(MODELS["plain"], PROMPT, 24, draft=Draft(oracle.propose, 8, 16, "chain"))
    assert_same(got, want)
    assert (got.rounds, got.committed, got.accepted_by_depth) == (3, 24, [3] * 7)


def test_a_chain_shaped_tree_is_the_chain():
    _, text = plain("v3", "sampled", 20)
    outs = []
    for shape in ("tree", "chain"):
        oracle = Oracle(text, MICRO_V3.vocab_size, [0.8], topk=1, seed=3)
        outs.append(generate(MODELS["v3"], PROMPT, 20, RULES["sampled"], draft=Draft(oracle.propose, 5, 16, shape)))
    for key in dataclasses.asdict(outs[0]):
        assert np.array_equal(getattr(outs[0], key), getattr(outs[1], key)), key


@pytest.mark.parametrize("budget", [0, 16])
def test_stops_and_lengths_cut_inside_an_accepted_run(budget):
    """At every place: the first stop token is the last emitted; at max_tokens too it is a stop."""
    want, text = plain("plain", "greedy", 10)
    for place, token in enumerate(want.tokens):
        first = want.tokens.index(token)
        for max_tokens in (first + 1, 10):
            draft = Draft(Oracle(text, MICRO.vocab_size, [1.0]).propose, 8, budget)
            got = generate(MODELS["plain"], PROMPT, max_tokens, stop={token, 60}, draft=draft)
            assert (got.tokens, got.reason) == (want.tokens[: first + 1], "stop")
        draft = Draft(Oracle(text, MICRO.vocab_size, [1.0]).propose, 8, budget)
        got = generate(MODELS["plain"], PROMPT, place + 1, draft=draft)
        assert (got.tokens, got.reason) == (want.tokens[: place + 1], "length")
        assert len(got.logits) == place + 1 and got.committed <= place + 1


@dataclasses.dataclass(frozen=True)
class Watched(Model):
    """A model that notes every position it runs."""

    seen: set = dataclasses.field(default_factory=set)

    def forward_tokens(self, tokens, positions, mask, cache):
        self.seen.update(positions)
        return super().forward_tokens(tokens, positions, mask, cache)


@pytest.mark.parametrize("length", [1, 33, 38, 39, 40])
def test_the_context_ends_at_the_last_position(length):
    """A token may be run at position max_position_embeddings - 1 (39), none beyond, and its successor is emitted."""
    prompt = [i % MICRO.vocab_size for i in range(length)]
    want = generate(MODELS["plain"], prompt, 1000)
    assert len(want.tokens) == 40 - length + 1 and want.reason == "length"
    for shape in ("tree", "chain"):
        model = Watched(MICRO, MODELS["plain"].weights)
        # The oracle knows more than fits, and is always right as far as the text goes.
        oracle = Oracle([*prompt, *want.tokens, *range(9)], MICRO.vocab_size, [1.0])
        assert_same(generate(model, prompt, 1000, draft=Draft(oracle.propose, 8, 30, shape)), want)
        assert max(model.seen) == 39


def test_prompts_that_do_not_fit():
    for prompt in ([], [1] * 41):
        with pytest.raises(ValueError, match=r"must be 1\.\.40"):
            generate(MODELS["plain"], prompt, 4)


def test_sampling_is_a_function_of_seed_and_prompt():
    rule = RULES["sampled"]
    texts = {
        tuple(generate(MODELS["plain"], PROMPT, 12, dataclasses.replace(rule, seed=seed)).tokens) for seed in range(6)
    }
    assert len(texts) == 6
    again = generate(MODELS["plain"], PROMPT, 12, rule).tokens
    assert again == plain("plain", "sampled", 20)[0].tokens[:12] != plain("plain", "greedy", 20)[0].tokens[:12]


@pytest.mark.parametrize("budget", [0, 12])
def test_noise_is_keyed_by_the_place_of_the_chosen_token(budget):
    _, text = plain("plain", "sampled", 20)
    oracle = Oracle(text, MICRO.vocab_size, [0.7])
    got = generate(MODELS["plain"], PROMPT, 20, RULES["sampled"], draft=Draft(oracle.propose, 8, budget))
    for place, (token, row) in enumerate(zip(got.tokens, got.logits, strict=True), start=len(PROMPT)):
        assert token == choose(row, place, RULES["sampled"])


def test_oracle_hits_as_often_and_as_high_as_told():
    text = list(range(50))
    oracle = Oracle(text, 61, [1.0, 0.5, 0.0], rank=3, topk=5, seed=0)
    ranks = np.zeros((4, 6))
    for _ in range(400):
        got = oracle.propose(text[:10], 4)
        assert (got.lp <= 0).all() and (np.diff(got.lp) <= 0).all() and got.ids.shape == (4, 5)
        for d in range(4):
            assert len(set(got.ids[d])) == 5
            where = np.flatnonzero(got.ids[d] == text[10 + d])
            ranks[d, where[0] if len(where) else 5] += 1
    assert ranks[0, 3:].sum() == 0 and ranks[2:, :5].sum() == 0
    assert (np.abs(ranks[0, :3] - 400 / 3) < 40).all() and abs(ranks[1, 5] - 200) < 40
    assert oracle.propose(text, 4) is None and oracle.propose(text[:48], 4).ids.shape == (2, 5)
