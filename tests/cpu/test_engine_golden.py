"""DDTree == chain == AR == golden: both models, TP 1, 2 and 4, any draft, any batch; logits too."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kdtp.config import DrafterConfig
from kdtp.types import SamplingParams
from tests.harness import NONE, Harness
from tests.processes import TINY, V3

MODELS = {"tiny": TINY, "v3": V3}
TOLERANCE = 1e-4  # logits against the numpy reference; ends of test runs print what was found
pytestmark = pytest.mark.timeout(300)


# Each is set up once, by one pytest-xdist worker. The same objects everywhere: pytest compares parameters by identity.
SETUPS = {
    (name, tp): pytest.param((name, tp), id=f"{name}-tp{tp}", marks=pytest.mark.xdist_group(f"{name}-tp{tp}"))
    for name in MODELS
    for tp in (1, 2, 4)
}


def setups(*sizes: int, models=MODELS):
    """Models on numbers of ranks."""
    return [SETUPS[name, tp] for name in models for tp in sizes]


# Four ranks are slow on few cores; rules and numbers of tokens are the coordinator's, or each rank's as with two.
up_to_two = pytest.mark.parametrize("ranks", setups(1, 2), indirect=True)


@pytest.fixture(scope="module", params=setups(1, 2, 4))
def ranks(request):
    name, tp = request.param
    harness = Harness(MODELS[name], tp)
    yield harness
    harness.close()


def oracle(**changes) -> DrafterConfig:
    return DrafterConfig("oracle", **changes)


def greedy(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count)


def test_every_method_gives_the_golden_tokens(ranks, record_property):
    golden = ranks.plan.golden
    known = {golden.prompt: golden.tokens}
    count = len(golden.tokens)
    methods = {
        "AR": NONE,
        "chain": oracle(shape="chain", budget=7),
        "tree": oracle(budget=16),
        "partial tree": oracle(budget=24, hit=(0.8, 0.6), rank=3, seed=1),
        "wrong tree": oracle(budget=9, hit=(0.0,)),
        "ngram": DrafterConfig("ngram"),
    }
    plain = None
    for method, drafter in methods.items():
        (done,) = ranks.run([golden.prompt], greedy(count), drafter, known)
        assert done.tokens == list(golden.tokens), method
        difference = np.abs(done.logits - golden.logits).max()
        assert difference <= TOLERANCE, (method, difference)
        plain = plain if plain is not None else done.logits
        # Stronger than the tolerance: a row's logits do not depend on the tree that it was verified in.
        assert done.logits.tobytes() == plain.tobytes(), method
        if method == "tree":
            assert (done.usage.rounds, done.usage.committed) == (count // 8, count)
        record_property(f"max_abs_logit_diff {method}", float(difference))


@up_to_two
def test_budget_zero_is_plain_decoding_with_as_many_forwards(ranks):
    golden = ranks.plan.golden
    runs = [
        ranks.run([golden.prompt], greedy(24), d, {golden.prompt: golden.tokens})[0] for d in (NONE, oracle(budget=0))
    ]
    assert runs[0].tokens == runs[1].tokens == list(golden.tokens[:24])
    assert runs[0].usage.forwards == runs[1].usage.forwards == 24
    assert runs[0].logits.tobytes() == runs[1].logits.tobytes()


def texts(ranks: Harness, params):
    """Plain continuations of several prompts, each run alone; of fewer where that takes longer."""
    vary = {1: 8, 2: 5, 4: 3}[ranks.config.tp]
    rng = random.Random(3)
    golden = ranks.plan.golden
    vocab = ranks.plan.model.vocab_size
    prompts = [golden.prompt] + [
        tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 70))) for _ in range(vary - 1)
    ]
    return {prompt: ranks.run([prompt], params)[0] for prompt in prompts}


def check_batches(ranks: Harness, alone, params, cases: int, seed: int) -> None:
    """Random drafts for random batches: each text and its logits as when it is run alone and plainly."""
    rng = random.Random(seed)
    known = {prompt: tuple(done.tokens) for prompt, done in alone.items()}
    accepted = set()
    for case in range(cases):
        prompts = rng.sample(list(alone), rng.randint(1, len(alone)))
        budget = rng.choice([1, 2, 3, 5, 7, 12, 16, 33, 64])
        name = "ngram" if rng.random() < 0.1 else "oracle"
        drafter = DrafterConfig(
            name, rng.randint(2, 10), budget, topk=8, shape=rng.choice(["tree", "tree", "chain"]),
            hit=tuple(rng.random() ** 0.5 for _ in range(3)), rank=rng.randint(1, 4), seed=case,
        )  # fmt: skip
        done = ranks.run(
            prompts, params, drafter, known, prefill_chunk=rng.choice([16, 64, 256]), max_batch=rng.randint(1, 8)
        )
        for prompt, got in zip(prompts, done, strict=True):
            assert got.tokens == alone[prompt].tokens, (drafter, prompt)
            assert got.logits.tobytes() == alone[prompt].logits.tobytes(), (drafter, prompt)
            assert (got.logprobs, got.scored) == (alone[prompt].logprobs, alone[prompt].scored), (drafter, prompt)
            accepted.add(got.usage.accepted_by_depth)
    assert len(accepted) > cases // 4, "the drafts were all alike"


def test_random_drafts_and_batches(ranks):
    cases = {1: 30, 2: 8, 4: 3}[ranks.config.tp]
    params = greedy(14)
    check_batches(ranks, texts(ranks, params), params, cases, seed=ranks.config.tp)


@up_to_two
@pytest.mark.parametrize(
    "rule", [{}, {"top_k": 40}, {"top_p": 0.9, "min_p": 0.02}], ids=["plain", "top-k", "top-p min-p"]
)
def test_sampled_text_is_the_same_with_any_draft(ranks, rule):
    cases = {1: 8, 2: 3}[ranks.config.tp]
    params = SamplingParams(max_tokens=12, temperature=0.9, seed=11, **rule)
    alone = texts(ranks, params)
    assert alone[ranks.plan.golden.prompt].tokens != list(ranks.plan.golden.tokens[:12])
    check_batches(ranks, alone, params, cases, seed=5)


RULES = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "sampled penalties": {"temperature": 0.9, "frequency_penalty": 0.7, "top_p": 0.95, "seed": 3},
    "bias": {"logit_bias": {7: 4.0, 11: 3.5, 300: -100.0}, "banned_tokens": (5, 6), "repetition_penalty": 1.1},
    "scores": {"logprobs": 3, "prompt_logprobs": 2, "allowed_tokens": tuple(range(40, 90)), "temperature": 1.2},
}


def check_rule(ranks: Harness, name: str) -> None:
    params = SamplingParams(max_tokens=12, **RULES[name])
    alone = texts(ranks, params)
    assert alone[ranks.plan.golden.prompt].tokens != list(ranks.plan.golden.tokens[:12])
    check_batches(ranks, alone, params, {1: 4, 2: 2, 4: 1}[ranks.config.tp], seed=9)
    if params.prompt_logprobs is not None:
        assert all(len(done.scored) == len(prompt) - 1 for prompt, done in alone.items())


@up_to_two
@pytest.mark.parametrize("name", RULES)
def test_any_rule_gives_the_same_text_with_any_draft(ranks, name):
    check_rule(ranks, name)


@pytest.mark.parametrize("ranks", setups(4), indirect=True)
@pytest.mark.parametrize("name", ["sampled penalties", "scores"])
def test_four_ranks_give_the_same_text_with_any_draft(ranks, name):
    check_rule(ranks, name)


@up_to_two
def test_sampled_text_depends_on_the_seed(ranks):
    def text(seed: int) -> tuple[int, ...]:
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=seed)
        return tuple(ranks.run([ranks.plan.golden.prompt], params)[0].tokens)

    runs = [text(seed) for seed in (1, 1, 2, -1)]
    assert runs[0] == runs[1] and len(set(runs)) == 3


@pytest.mark.parametrize("ranks", [*setups(1), *setups(2, models=["tiny"])], indirect=True)
def test_a_pool_too_small_for_all_changes_no_text(ranks):
    """Prefix hits, preemptions and requests that run their text again, among requests of every kind."""
    rng = random.Random(8)
    stem = tuple(rng.randrange(ranks.plan.model.vocab_size) for _ in range(66))
    prompts = [stem[:3], stem[3:16], (*stem, 1), (*stem, 2)]
    rules = [{}, {"frequency_penalty": 0.9, "logprobs": 2}, {"temperature": 1.1, "seed": 4}, {"presence_penalty": 1.0}]
    params = [SamplingParams(max_tokens=n, **rule) for n, rule in zip((130, 125, 9, 9), rules, strict=True)]
    alone = [ranks.run([prompt], p, prefix_cache=False)[0] for prompt, p in zip(prompts, params, strict=True)]
    known = {prompt: tuple(done.tokens) for prompt, done in zip(prompts, alone, strict=True)}
    drafter = oracle(budget=12, hit=(0.8,), rank=2)
    together = ranks.run([*prompts, prompts[2]], [*params, params[2]], drafter, known, kv_tokens=256)
    for got, want in zip(together, [*alone, alone[2]], strict=True):
        assert (got.tokens, got.reason, got.logprobs) == (want.tokens, want.reason, want.logprobs)
        assert got.logits.tobytes() == want.logits.tobytes()
    assert sum(done.usage.preemptions for done in together) > 0 and together[-1].usage.cached_tokens == 64


def test_one_batch_may_hold_every_kind_of_request(ranks):
    golden = ranks.plan.golden
    params = [
        greedy(24),
        SamplingParams(max_tokens=9, temperature=1.2, seed=3),
        SamplingParams(max_tokens=30, stop_tokens=(golden.tokens[10],)),
        SamplingParams(max_tokens=5, temperature=0.5, top_k=3),
    ]
    known = {golden.prompt: golden.tokens}
    together = ranks.run([golden.prompt] * 4, params, oracle(hit=(0.9,), rank=2), known)
    for p, got in zip(params, together, strict=True):
        (alone,) = ranks.run([golden.prompt], p)
        assert (got.tokens, got.reason) == (alone.tokens, alone.reason)
    assert together[2].reason == "stop" and together[2].tokens[-1] == golden.tokens[10]
