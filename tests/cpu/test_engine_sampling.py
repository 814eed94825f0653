"""Sampling parameters through the whole engine: against numpy, and what a client sees of them."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from model_cases import RANDOM, write_random
from reference_cases import random_model, run_text

from kdtp.config import DrafterConfig
from kdtp.types import SamplingParams
from reference.generate import generate
from reference.rules import Rule, log_softmax
from tests.harness import Harness

PROMPT = (7, 1, 1, 30)
CONFIG = dataclasses.replace(RANDOM["micro"], max_position_embeddings=400)
MODEL = random_model(CONFIG)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    harness = Harness(write_random(tmp_path_factory.mktemp("model") / "micro.kdtr", CONFIG))
    yield harness
    harness.close()


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.4},
        {"frequency_penalty": 0.8, "presence_penalty": -0.5},
        {"temperature": 1.3, "seed": 5, "repetition_penalty": 0.8, "top_k": 30},
        {"temperature": 0.8, "top_p": 0.7, "frequency_penalty": 1.5, "banned": (3, 60)},
        {"allowed": tuple(range(5, 25)), "presence_penalty": 2.0},
    ],
)
@pytest.mark.parametrize("drafter", [DrafterConfig(), DrafterConfig("ngram", budget=12)], ids=["plain", "tree"])
def test_the_text_is_that_of_numpy(engine, fields, drafter):
    rule = Rule(logit_bias=((9, 0.5), (20, -2.0)), **fields)
    want = generate(MODEL, PROMPT, 30, rule)
    names = {"allowed": "allowed_tokens", "banned": "banned_tokens"}
    params = SamplingParams(
        max_tokens=30, logit_bias=dict(rule.logit_bias), **{names.get(k, k): v for k, v in fields.items()}
    )
    (done,) = engine.run([PROMPT], params, drafter)
    assert done.tokens == want.tokens and len(set(done.tokens)) > 3


def test_logprobs_are_of_the_models_own_distribution(engine):
    """Neither penalties nor temperature change them; chosen and best ids are those of the raw logits."""
    params = SamplingParams(
        max_tokens=10, temperature=1.5, seed=2, presence_penalty=1.0, logit_bias={4: 5.0}, logprobs=4, prompt_logprobs=0
    )
    prompt = tuple(random.Random(1).randrange(61) for _ in range(90))
    (done,) = engine.run([prompt], params, DrafterConfig("ngram"), prefill_chunk=20)
    laws = [log_softmax(row) for row in run_text(MODEL, prompt + tuple(done.tokens))]
    for place, known in enumerate((*done.scored, *done.logprobs), start=1):
        law = laws[place - 1]
        order = np.argsort(-law, kind="stable")
        assert known.token == (prompt + tuple(done.tokens))[place]
        assert known.logprob == pytest.approx(law[known.token], abs=1e-4)
        assert known.rank == 1 + list(order).index(known.token)
        want = order[:4] if place >= len(prompt) else []
        assert [token for token, _ in known.best] == list(want)
    assert len(done.scored) == 89 and len(done.logprobs) == 10


def test_a_prompt_is_scored_once_though_its_rows_are_lost(engine):
    prompts = [(7, 1, 1), tuple(range(20, 33)), tuple(range(50))]
    scores = {"prompt_logprobs": 1, "logprobs": 0}
    params = [SamplingParams(max_tokens=130), *(SamplingParams(max_tokens=n, **scores) for n in (120, 70))]
    alone = [engine.run([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    together = engine.run(prompts, params, DrafterConfig("ngram"), kv_tokens=256, prefill_chunk=20)
    for got, want in zip(together, alone, strict=True):
        assert (got.tokens, got.scored, got.logprobs) == (want.tokens, want.scored, want.logprobs)
    assert sum(done.usage.preemptions for done in together) > 0


@pytest.mark.parametrize("length", [1, 2, 64, 129])
def test_scoring_alone_emits_nothing(engine, length):
    prompt = tuple(random.Random(length).randrange(61) for _ in range(length))
    (done,) = engine.run([prompt], SamplingParams(max_tokens=0, prompt_logprobs=1), prefill_chunk=50)
    assert (done.tokens, done.reason, len(done.scored)) == ([], "length", length - 1)
    assert [known.token for known in done.scored] == list(prompt[1:])


def test_no_stop_before_min_tokens(engine):
    (plain,) = engine.run([PROMPT], SamplingParams(max_tokens=40))
    stop = plain.tokens[2]
    stops = (stop, plain.tokens[5])
    for least in (0, 1, 4, 9):
        for drafter in (DrafterConfig(), DrafterConfig("ngram")):
            params = SamplingParams(max_tokens=40, stop_tokens=stops, min_tokens=least)
            (done,) = engine.run([PROMPT], params, drafter)
            assert len(done.tokens) > least or done.reason == "length"
            assert not set(stops) & set(done.tokens[:least])
            if least < 3:
                assert done.tokens == plain.tokens[:3] and done.reason == "stop"


RULES = [
    {},
    {"temperature": 1.2, "seed": 9, "repetition_penalty": 1.2},
    {"frequency_penalty": 1.0, "presence_penalty": 0.5, "min_tokens": 20, "stop_tokens": (3, 9, 17, 25, 33, 41)},
]


@pytest.mark.parametrize("fields", RULES, ids=["greedy", "sampled", "penalties"])
def test_a_text_goes_on_behind_what_was_emitted_elsewhere(engine, fields):
    """As after the end of another engine: at every cut, with the rules' counts, positions and noise."""
    params = SamplingParams(max_tokens=40, logprobs=1, **fields)
    (whole,) = engine.run([PROMPT], params)
    cuts = [n for n in (1, 2, 7, 19, 20, 21, 38) if n < len(whole.tokens)]
    for drafter in (DrafterConfig(), DrafterConfig("ngram", budget=12)):
        params_of = [params] * len(cuts)
        done = engine.run([PROMPT] * len(cuts), params_of, drafter, given=[whole.tokens[:n] for n in cuts])
        for n, got in zip(cuts, done, strict=True):
            assert (got.tokens, got.reason) == (whole.tokens, whole.reason)
            assert got.logprobs == whole.logprobs[n:] and got.logits.tobytes() == whole.logits[n:].tobytes()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((1,) * 5, "given: 5 tokens, which is all"),
        ((1, 61), r"given\[1\] = 61"),
        ((1, 8), "given: holds 8, which ends"),
    ],
)
def test_what_cannot_have_been_emitted_is_refused(engine, given, words):
    with pytest.raises(ValueError, match=words):
        engine.run([PROMPT], SamplingParams(max_tokens=5, stop_tokens=(8,)), given=[given])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": 0}, ["max_tokens = 0", "1..16777216"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty = 0.0", "0.01..100"]),
        ({"repetition_penalty": float("nan")}, ["repetition_penalty = nan"]),
        ({"presence_penalty": 2.1}, ["presence_penalty = 2.1", "-2..2"]),
        ({"frequency_penalty": float("-inf")}, ["frequency_penalty = -inf"]),
        ({"logit_bias": {5: 101.0}}, ["logit_bias[5] = 101.0", "-100..100"]),
        ({"logit_bias": {5: float("nan")}}, ["logit_bias[5] = nan"]),
        ({"min_tokens": 6, "max_tokens": 5}, ["min_tokens = 6", "0..5"]),
        ({"logprobs": 21}, ["logprobs = 21", "0..20"]),
        ({"prompt_logprobs": -1}, ["prompt_logprobs = -1", "0..20"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(fields, words):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**fields)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("key", ["allowed_tokens", "banned_tokens", "logit_bias"])
def test_an_id_beyond_the_vocabulary_is_refused(engine, key):
    params = SamplingParams(**{key: {61: 1.0} if key == "logit_bias" else (61,)})
    with pytest.raises(ValueError, match=rf"{key}\[0\] = 61: must be in \[0, 61\)"):
        engine.run([PROMPT], params)
