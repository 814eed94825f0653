"""Widths by measured cost in the engine: the text is plain decoding's, whatever the width and whenever it changes."""

from __future__ import annotations

import itertools
import random

import pytest
from test_engine_coordinator import check_empty, engine, known, oracle, run

from kdtp.config import ConfigError, DrafterConfig
from kdtp.engine import widths
from kdtp.engine.request import Request
from kdtp.engine.widths import Widths
from kdtp.spec.costs import Costs
from kdtp.spec.width import Policy
from kdtp.types import SamplingParams
from tests.fake_target import continuation
from tests.harness import NONE, Harness
from tests.processes import TINY


class Random:
    """A policy that does as it likes."""

    def __init__(self, seed):
        self.rng, self.sizes = random.Random(seed), []

    def drafts(self, asking):
        return self.rng.randint(0, asking)

    def choose(self, trees, asked, asking, seqs, rows, context, took):
        self.sizes += [self.rng.randrange(len(grown.tree)) for grown in trees]
        return self.sizes[-len(trees) :]

    def learn(self, *values): ...
    def learn_draft(self, *values): ...
    def learn_tree(self, grown, accepted):
        assert accepted <= set(range(len(grown.tree)))


@pytest.mark.parametrize("seed", range(6))
def test_any_widths_give_the_text(seed):
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(90) for _ in range(rng.randint(1, 80))) for _ in range(4)]
    texts = {k: v for prompt in prompts for k, v in known(prompt).items()}
    drafter = oracle(width="auto", hit=(0.9, 0.7), rank=2, budget=12, seed=seed, shape=rng.choice(["tree", "seeded"]))
    coordinator, workers = engine(drafter, texts, max_batch=3, prefill_chunk=32)
    coordinator.widths = Widths(Random(seed))
    for i, prompt in enumerate(prompts):
        coordinator.submit(Request(i, prompt, SamplingParams(max_tokens=30)))
    done = run(coordinator)
    for i, prompt in enumerate(prompts):
        assert done[i][0] == continuation(prompt, 30)
    assert len(set(coordinator.widths.policy.sizes)) > 5
    check_empty(coordinator, workers)


def test_widths_are_measured_and_leave_nothing_behind():
    coordinator, workers = engine(oracle(width="auto", budget=20), known((1, 2, 3)), max_batch=4)
    coordinator.start()
    check_empty(coordinator, workers)
    sizes = [size for size, _ in coordinator.widths.policy.rounds._curve]
    assert sizes[0] == 4 and sizes[-1] == 84 and len(sizes) > 6  # on a CPU whole tiles of 4 rows
    assert [seqs for seqs, _ in coordinator.widths.policy.drafting._curve] == [1, 2, 4]
    assert not coordinator.drafter._seqs
    coordinator.submit(Request(1, (1, 2, 3), SamplingParams(max_tokens=60)))
    tokens, end = run(coordinator)[1]
    assert tokens == continuation((1, 2, 3), 60)
    assert end.usage.rounds < 40  # the oracle is right, so it drafts
    check_empty(coordinator, workers)


def test_what_comes_between_a_measurement_is_not_believed(monkeypatch):
    """Three sizes in a row, one after the other, take 50 times as long: they would look dear for ever."""
    calls = itertools.count()
    monkeypatch.setattr(
        widths, "_forward", lambda rows, *_: 1e-4 * (1 + rows / 50) * (50 if next(calls) in (2, 3, 4) else 1)
    )
    coordinator, _ = engine(oracle(width="auto", budget=20), known((1, 2, 3)), max_batch=4)
    coordinator.start()
    curve = dict(coordinator.widths.policy.rounds._curve)
    assert len(curve) > 6 and curve == pytest.approx({rows: 1e-4 * (1 + rows / 50) for rows in curve}, rel=0.05)


def test_a_pool_too_small_to_measure_much():
    coordinator, _ = engine(oracle(width="auto", budget=60), known((1, 2, 3)), kv_tokens=64)
    coordinator.start()
    coordinator.submit(Request(1, (1, 2, 3), SamplingParams(max_tokens=20)))
    assert run(coordinator)[1][0] == continuation((1, 2, 3), 20)


def test_what_costs_too_much_is_not_run():
    """Drafts that are never right: after a while no more trees, and nothing is lost."""
    coordinator, _ = engine(oracle(width="auto", hit=(0.0,), budget=8), known((1, 2, 3)))
    rounds = Costs({4: 1e-4, 12: 1e-3}, lambda rows: 4 if rows == 1 else 12)
    coordinator.widths = Widths(Policy(rounds, Costs({1: 1e-5}, int, rounds)))
    coordinator.submit(Request(1, (1, 2, 3), SamplingParams(max_tokens=190)))
    tokens, end = run(coordinator)[1]
    assert tokens == continuation((1, 2, 3), 190)
    assert coordinator.counters["rounds"] < 90 and end.usage.rounds == 189
    assert coordinator.counters["rounds_not_drafted"] > 90


def test_a_real_model_with_the_clock():
    harness = Harness(TINY)
    golden = harness.plan.golden
    prompts = [golden.prompt, golden.prompt[:9], golden.prompt[:30]]
    params = SamplingParams(max_tokens=40)
    plain = harness.run(prompts, params, NONE)
    texts = {p: tuple(d.tokens) for p, d in zip(prompts, plain, strict=True)}
    for drafter in (oracle(width="auto", hit=(0.8,), rank=2), DrafterConfig("ngram", width="auto")):
        for got, want in zip(harness.run(prompts, params, drafter, texts), plain, strict=True):
            assert got.tokens == want.tokens and got.logits.tobytes() == want.logits.tobytes()
    harness.close()


def test_a_width_that_is_none():
    with pytest.raises(ConfigError, match=r"drafter\.width = '12': must be one of budget, auto"):
        DrafterConfig("ngram", width="12")
