"""The engine with a DFlash drafter: DDTree == chain == AR; drafts are functions of the text alone; refusals."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close
from dflash_cases import V1, V2, draw, shapes, write_folder
from model_cases import RANDOM, Ranks, write_random
from reference_cases import random_model

from kdtp import Engine
from kdtp.config import ConfigError, DrafterConfig, EngineConfig, ModelConfig
from kdtp.engine.plan import plan
from kdtp.engine.request import Request
from kdtp.model.weights.safetensors import CheckpointError
from kdtp.types import SamplingParams
from reference.cache import Cache
from reference.dflash import DFlashConfig
from reference.norm import rms_norm
from tests.harness import NONE, Harness
from tests.processes import TINY

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("dflash")]
LONG = {name: dataclasses.replace(RANDOM[name], max_position_embeddings=400) for name in ("micro_v3",)}


def drafter_folder(folder: Path, base: dict[str, Any], model: ModelConfig) -> Path:
    """A random drafter for a model."""
    layers = list(range(model.num_hidden_layers))[-2:]
    sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size, "block_size": 5}
    nested = base["dflash_config"] | {"target_layer_ids": layers}
    values = base | sizes | {"num_target_layers": model.num_hidden_layers, "dflash_config": nested}
    second = {k: v for k, v in nested.items() if k.startswith(("conv", "selector"))}
    config = DFlashConfig(model.hidden_size, 40, 8, 4, 10, 5, 7, (0, 0), (False, False), **second)
    rng = np.random.default_rng(0)
    table = shapes(config, False, len(layers), model.vocab_size)
    return write_folder(folder, values, {name: draw(rng, name, shape) for name, shape in table.items()})


@pytest.fixture(scope="module", params=list(LONG))
def loaded(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    harness = Harness(write_random(folder / "m.kdtr", LONG[request.param]))
    yield (
        harness,
        {name: drafter_folder(folder / name, base, harness.plan.model) for name, base in (("v1", V1), ("v2", V2))},
    )
    harness.close()


def settings(folder: Path, **changes) -> DrafterConfig:
    return DrafterConfig("dflash", **{"block": 5, "budget": 24, "model": str(folder)} | changes)


def random_text(seed: int, size: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(50) for _ in range(size))


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_any_draft_gives_the_text_and_the_bits_of_plain_decoding(loaded, version, temperature):
    harness, folders = loaded
    params = SamplingParams(max_tokens=14, temperature=temperature, seed=3)
    prompts = [random_text(i, size) for i, size in enumerate((1, 20, 90))]
    plain = harness.run(prompts, params)
    accepted = 0
    for changes in ({}, {"shape": "chain"}, {"budget": 7, "window": 16}, {"budget": 0}):
        drafter = settings(folders[version], **changes)
        done = harness.run(prompts, params, drafter, prefill_chunk=64, max_batch=2)
        for got, want in zip(done, plain, strict=True):
            assert got.tokens == want.tokens and got.logits.tobytes() == want.logits.tobytes(), changes
            accepted += sum(got.usage.accepted_by_depth)
            assert bool(got.usage.drafted_by_depth) == (drafter.budget > 0)
    assert accepted > 5


def drafts(harness: Harness, drafter: DrafterConfig, requests, **changes):
    """All proposals of a run, by the text they were made for."""
    coordinator = harness.coordinator(drafter, None, **changes)
    found = {}
    propose = coordinator.drafter.propose

    def recording(asks):
        proposals = propose(asks)
        for ask, proposal in zip(asks, proposals, strict=True):
            request = coordinator.scheduler.find(ask.seq)
            found[request.prompt + tuple(request.tokens)] = proposal
        return proposals

    coordinator.drafter.propose = recording
    for batch in requests:
        for request in batch:
            coordinator.submit(request)
        while not coordinator.idle:
            coordinator.step()
    return found, coordinator


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_drafts_depend_on_the_text_alone(loaded, version):
    """Whatever made the context: chunks, trees, a prefix that another request left, preemption, a width of 0."""
    harness, folders = loaded
    drafter = settings(folders[version])
    prompts = [random_text(0, 70) + random_text(i, 52) for i in (1, 2, 3)]  # one page in common

    def requests(first=0, size=14, **changes):
        return [Request(first + i, p, SamplingParams(max_tokens=size), **changes) for i, p in enumerate(prompts)]

    alone, _ = drafts(harness, drafter, [[r] for r in requests(size=40)], prefix_cache=False)
    runs = {
        "chunks": drafts(harness, drafter, [requests()], prefill_chunk=16, prefix_cache=False, max_batch=2),
        "prefix": drafts(harness, drafter, [[r] for r in requests()]),
        "undrafted prefix": drafts(harness, drafter, [requests(speculate=False), requests(10)]),
        "preempted": drafts(harness, drafter, [requests(size=40)], kv_tokens=4 * 64),
        "narrow": drafts(harness, drafter, [requests(budget=1)]),
    }
    for name, (found, coordinator) in runs.items():
        shared = found.keys() & alone.keys()
        assert len(shared) >= (len(alone) // 3 if name == "preempted" else len(prompts)), name
        totals = coordinator.totals()
        assert totals["prefix_hits"] > 0 or "prefix" not in name, name
        assert totals["preemptions"] > 0 or name != "preempted", totals
        for text in shared:
            size = min(len(found[text].lp), len(alone[text].lp))
            assert_close(found[text].lp[:size], alone[text].lp[:size], atol=1e-5)
            assert torch.equal(found[text].ids[:size], alone[text].ids[:size]), name


def residual_after(model, layer: int, tokens: list[int]) -> np.ndarray:
    """The reference's stream behind a layer, [T, H]."""
    cache, mask, eps = Cache(model.config, len(tokens)), np.tri(len(tokens), dtype=bool), model.config.rms_norm_eps
    x = model.weights["embed"][tokens]
    for i in range(layer + 1):
        w = model.layer(i)
        x = x + model.attention(i, w, rms_norm(x, w["attn_norm"], eps), range(len(tokens)), mask, cache)
        x = x + model.mlp(i, w, rms_norm(x, w["mlp_norm"], eps))
    return x


@pytest.mark.parametrize("tp", [1, 2])
def test_features_are_the_stream_behind_their_layers(tp, tmp_path):
    config = dataclasses.replace(RANDOM["grouped"], num_hidden_layers=3)
    ranks = Ranks(write_random(tmp_path / "m.kdtr", config), tp)
    tokens = [3, 1, 4, 1, 5, 9, 2]
    plain = ranks.run(0, 0, tokens)
    assert all(shard.features is None for shard in ranks.shards)
    for shard in ranks.shards:
        shard.tap([2, 0, 0])
    tapped = ranks.run(1, 0, tokens)
    assert torch.equal(tapped, plain)
    want = np.concatenate([residual_after(random_model(config), i, tokens) for i in (2, 0, 0)], 1)
    for shard in ranks.shards:
        assert_close(shard.features[: len(tokens)], want, atol=2e-5)
    assert np.abs(want[:, :16] - residual_after(random_model(config), 1, tokens)).max() > 0.1  # an off-by-one shows


@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_bits_of_a_golden_model(shape, tmp_path):
    harness = Harness(TINY)
    golden = harness.plan.golden
    drafter = settings(drafter_folder(tmp_path, V1, harness.plan.model), shape=shape, budget=60, topk=60)
    plain, done = (harness.run([golden.prompt], SamplingParams(max_tokens=10), d)[0] for d in (NONE, drafter))
    harness.close()
    assert done.tokens == list(golden.tokens[:10]) and done.logits.tobytes() == plain.logits.tobytes()


def test_from_the_outside(tmp_path):
    """A golden model; a block of 5 although 8 are asked for."""
    checked = plan(EngineConfig(str(TINY)))
    folder = drafter_folder(tmp_path, V2, checked.model)
    with Engine(str(TINY), drafter=settings(folder, block=8, shape="chain")) as engine:
        (done,) = engine.generate([checked.golden.prompt], SamplingParams(max_tokens=8))
    assert list(done.tokens) == list(checked.golden.tokens[:8])
    assert len(done.usage.drafted_by_depth) == 4


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"hidden_size": 17}, "hidden_size = 17: the model's is 14; this drafter is another model's"),
        ({"vocab_size": 500}, "vocab_size = 500: the model's is 53"),
        ({"num_target_layers": 60}, "num_target_layers = 60: the model's is"),
        ({"num_target_layers": None, "dflash_config": V1["dflash_config"] | {"target_layer_ids": [9]}}, "layers"),
        ({"intermediate_size": 44}, "mlp.gate_proj.weight': shape: want [44, 14], found [40, 14]"),
    ],
)
def test_a_drafter_that_does_not_fit(loaded, tmp_path, values, error):
    harness, folders = loaded
    text = json.loads((folders["v1"] / "config.json").read_text()) | values
    (tmp_path / "model.safetensors").symlink_to(folders["v1"] / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(text))
    config = EngineConfig(harness.plan.config.model, drafter=settings(tmp_path))
    with pytest.raises((ConfigError, CheckpointError)) as found:
        plan(config)
    assert error in str(found.value)


def test_a_folder_goes_with_a_network():
    for values in ({"name": "dflash"}, {"name": "ngram", "model": "x"}):
        with pytest.raises(ConfigError, match=r"drafter\.model"):
            DrafterConfig(**values)


def test_more_ranks_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="tp = 2: must be 1 with drafter dflash, so far"):
        plan(EngineConfig(str(TINY), tp=2, drafter=settings(tmp_path)))
