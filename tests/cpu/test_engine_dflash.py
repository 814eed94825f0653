"""The engine with a DFlash drafter: DDTree == chain == AR; drafts are functions of the text alone; refusals."""

from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
import torch
from compare import assert_close
from model_cases import RANDOM, Ranks, write_random
from reference_cases import random_model

from kdtp import Engine
from kdtp.config import ConfigError, DrafterConfig, EngineConfig
from kdtp.engine import plan as plans
from kdtp.engine.features import Shared, opened
from kdtp.engine.plan import plan
from kdtp.engine.request import Request
from kdtp.engine.widths import Widths
from kdtp.model.weights.safetensors import CheckpointError
from kdtp.types import SamplingParams
from reference.cache import Cache
from reference.norm import rms_norm
from tests.dflash import Loaded, accepted_alike, drafter_folder, drafts, grown_alike, random_text, settings
from tests.dflash_cases import V1, V2
from tests.harness import NONE, Harness
from tests.processes import TINY

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("dflash")]
THERE = {"trees": "device"}
WAYS = ({"shape": "chain"}, {"shape": "seeded"} | THERE, {"name": "dflash+ngram"})
HERE = {"placement": "coordinator"}
LONG = dataclasses.replace(RANDOM["grouped"], max_position_embeddings=400, vocab_size=53)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loaded")
    made = Loaded(folder, write_random(folder / "m.kdtr", LONG))
    yield made
    made.close()


@pytest.fixture(scope="module", params=[(2, "v1", ({}, HERE)), (4, "v2", ({},))], ids=["2-v1", "4-v2"])
def ranks(request, tmp_path_factory):
    """Several ranks, a drafter's version, and where its network is."""
    tp, version, places = request.param
    folder = tmp_path_factory.mktemp("ranks")
    made = Loaded(folder, write_random(folder / "m.kdtr", LONG), tp=tp)
    yield made, version, places
    made.close()


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_any_draft_gives_the_text_and_the_bits_of_plain_decoding(loaded, version, temperature):
    others = HERE, HERE | THERE, {"budget": 7, "window": 16} | THERE, {"budget": 0}
    check_drafts(loaded, version, temperature, ({}, *WAYS, *others))


def test_what_is_moved_waits_until_the_ranks_draft(loaded, monkeypatch):
    drafter = loaded.settings("v1")
    fleet, said = loaded.harness(drafter).fleet, []
    send = fleet.send
    monkeypatch.setattr(fleet, "send", lambda message: (said.append(type(message).__name__[0]), send(message)))
    prompts = [random_text(i, 20) for i in range(3)]
    params = [SamplingParams(max_tokens=size, temperature=0.8, seed=3) for size in (10, 20, 30)]
    loaded.harness(drafter).run(prompts, params, drafter)
    order = "".join(said)  # Forward, Keep, Draft, Commit
    assert "FKDCF" in order and order.endswith("FKC") and "KCD" not in order


def test_networks_of_many_ranks(ranks):
    many, version, places = ranks
    check_drafts(many, version, 0.8, (*places, THERE, WAYS[-1]), size=10)


def check_drafts(loaded, version, temperature, all_changes, size=14):
    params = SamplingParams(max_tokens=size, temperature=temperature, seed=3)
    prompts = [random_text(i, size) for i, size in enumerate((1, 20, 30))]
    prompts[2] *= 3  # which the lookup finds
    plain = loaded.harness(loaded.settings(version)).run(prompts, params)
    drafters = (loaded.settings(version, **changes) for changes in all_changes)
    accepted = accepted_alike(loaded, plain, prompts, params, drafters, prefill_chunk=64, max_batch=2)
    assert accepted > 3, accepted


def test_any_number_of_ranks_and_the_coordinator_draft_alike(ranks, loaded):
    many, version, places = ranks
    drafter = loaded.settings(version)
    requests = [Request(i, random_text(i, 30 * i + 9), SamplingParams(max_tokens=9)) for i in range(3)]
    one, _ = drafts(loaded.harness(drafter), drafter, [copies(requests)])
    for changes in places:
        drafter = many.settings(version, **changes)
        found, _ = drafts(many.harness(drafter), drafter, [copies(requests)])
        assert one.keys() == found.keys() and len(one) > 9
        for text, proposal in one.items():
            assert_close(found[text].lp, proposal.lp, atol=2e-5)
            assert torch.equal(found[text].ids, proposal.ids)


@pytest.mark.parametrize("shape", ["tree", "chain", "seeded"])
@pytest.mark.parametrize("place", [{}, HERE], ids=["workers", "coordinator"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_trees_are_the_same_wherever_they_are_grown(loaded, version, place, shape):
    """Of many sequences at once, each with a budget and a depth of its own, down to nothing."""
    drafter = loaded.settings(version, shape=shape, **place)
    sizes = zip((None, 3, 0, 24), (14, 9, 12, 3), strict=True)
    requests = [
        Request(i, random_text(i, 20 + i), SamplingParams(max_tokens=size), budget=budget)
        for i, (budget, size) in enumerate(sizes)
    ]
    grown = grown_alike(loaded.harness(drafter), drafter, requests)
    nodes = [max((len(made.tree) - 1 for request, made in grown if request.id == i), default=0) for i in range(4)]
    assert nodes[1] == 3 and nodes[2] == 0 and (nodes[0], nodes[3]) == ((4, 2) if shape == "chain" else (24, 24))


@pytest.mark.parametrize("name", ["v1", "v2"])
def test_measured_widths_of_trees_that_are_grown_there(loaded, name):
    params = SamplingParams(max_tokens=30, temperature=0.8, seed=3)
    prompts = [random_text(i, size) for i, size in enumerate((1, 20, 30))]
    plain = loaded.harness(loaded.settings(name)).run(prompts, params)
    drafter = loaded.settings(name, width="auto", **THERE)
    done = loaded.harness(drafter).run(prompts, params, drafter)
    assert [d.tokens for d in done] == [d.tokens for d in plain]


def copies(requests):
    return [Request(r.id, r.prompt, r.params) for r in requests]


class Seldom:
    """A policy that drafts for one sequence in every ninth round."""

    def __init__(self):
        self.rounds = 0

    def drafts(self, asking):
        self.rounds += 1
        return self.rounds % 9 == 0

    def choose(self, trees, *values):
        return [1] * len(trees)

    def learn(self, *values): ...

    learn_draft = learn_tree = learn


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_drafts_depend_on_the_text_alone(loaded, version):
    """Whatever made the context: chunks, trees, a prefix that another request left, preemption, a width of 0."""
    drafter = loaded.settings(version)
    harness, here = loaded.harness(drafter), loaded.settings(version, **HERE)
    prompts = [random_text(0, 70) + random_text(i, 52) for i in (1, 2, 3)]  # one page in common

    def requests(first=0, size=14, **changes):
        return [Request(first + i, p, SamplingParams(max_tokens=size), **changes) for i, p in enumerate(prompts)]

    # First, for later the pages have the rows of these texts, whoever brought them there.
    undrafted = drafts(harness, drafter, [requests(budget=0), requests(10)])
    alone, _ = drafts(harness, drafter, [[r] for r in requests(size=40)], prefix_cache=False)
    runs = {
        "chunks": drafts(harness, drafter, [requests()], prefill_chunk=16, prefix_cache=False, max_batch=2),
        "prefix": drafts(harness, drafter, [[r] for r in requests()]),
        "undrafted prefix": undrafted,
        "preempted": drafts(harness, drafter, [requests(size=40)], kv_tokens=4 * 64),
        "narrow": drafts(harness, drafter, [requests(budget=1)]),
        "seldom": drafts(harness, drafter, [requests(size=40)], Widths(Seldom())),
        "seldom, preempted": drafts(harness, drafter, [requests(size=40)], Widths(Seldom()), kv_tokens=4 * 64),
        "seldom, here": drafts(loaded.harness(here), here, [requests(size=40)], Widths(Seldom()), kv_tokens=4 * 64),
        "seldom, prefix": drafts(harness, drafter, [requests(), requests(10)], Widths(Seldom())),
    }
    for name, (found, coordinator) in runs.items():
        shared = found.keys() & alone.keys()
        assert len(shared) >= (len(alone) // 3 if name == "preempted" else len(prompts) - 1), name
        totals = coordinator.totals()
        assert totals["prefix_hits"] > 0 or "prefix" not in name, name
        assert totals["preemptions"] > 0 or "preempted" not in name, totals
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
    harness.close()
    harness = Harness(TINY, drafter=drafter)
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
        ({"hidden_size": 17}, "hidden_size = 17: the model's is 16; this drafter is another model's"),
        ({"vocab_size": 500}, "vocab_size = 500: the model's is 53"),
        ({"num_target_layers": 60}, "num_target_layers = 60: the model's is"),
        ({"num_target_layers": None, "dflash_config": V1["dflash_config"] | {"target_layer_ids": [9]}}, "layers"),
        ({"intermediate_size": 44}, "mlp.gate_proj.weight': shape: want [44, 16], found [40, 16]"),
    ],
)
def test_a_drafter_that_does_not_fit(loaded, tmp_path, values, error):
    folders = loaded.folders
    text = json.loads((folders["v1"] / "config.json").read_text()) | values
    (tmp_path / "model.safetensors").symlink_to(folders["v1"] / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(text))
    config = EngineConfig(str(loaded.model), drafter=settings(tmp_path))
    with pytest.raises((ConfigError, CheckpointError)) as found:
        plan(config)
    assert error in str(found.value)


def test_a_folder_goes_with_a_network():
    for values in ({"name": "dflash"}, {"name": "ngram", "model": "x"}):
        with pytest.raises(ConfigError, match=r"drafter\.model"):
            DrafterConfig(**values)


def test_from_the_outside_with_the_network_at_the_coordinator(tmp_path):
    checked = plan(EngineConfig(str(TINY)))
    drafter = settings(drafter_folder(tmp_path, V1, checked.model), placement="auto", topk=60)
    assert plan(EngineConfig(str(TINY), tp=2, drafter=drafter)).config.drafter.placement == "coordinator"
    assert plan(EngineConfig(str(TINY), drafter=drafter)).config.drafter.placement == "workers"
    with Engine(str(TINY), tp=2, drafter=drafter) as engine:
        (done,) = engine.generate([checked.golden.prompt], SamplingParams(max_tokens=8))
    assert list(done.tokens) == list(checked.golden.tokens[:8]) and done.usage.drafted_by_depth


def test_features_that_cannot_be_mapped():
    """Another process's memory, or of another width; and more rows than there is memory for."""
    shared = Shared(8, 6, torch.float32)
    there = opened(os.getpid(), shared.fd, 6, torch.float32)
    shared.tensor[3] = 2.5
    assert torch.equal(there, shared.tensor) and there[3].tolist() == [2.5] * 6
    with pytest.raises(ValueError, match="192 bytes: no rows of 7"):
        opened(os.getpid(), shared.fd, 7, torch.float32)
    with pytest.raises(OSError, match=r"No such file|Permission"):
        opened(os.getpid(), 999, 6, torch.float32)
    shared.check(shared.tensor[:4])
    with pytest.raises(RuntimeError, match="9 rows of features: shared memory is for 8"):
        shared.check(torch.zeros(9, 6))


@pytest.mark.parametrize("placement", ["coordinator", "here"])
def test_placements_that_are_not(placement, tmp_path, monkeypatch):
    if placement == "here":
        with pytest.raises(ConfigError, match=r"drafter\.placement = 'here': must be one of auto, workers"):
            settings(tmp_path, placement=placement)
        return
    monkeypatch.setattr(plans, "_check_cuda", lambda: None)
    folder = drafter_folder(tmp_path, V1, plan(EngineConfig(str(TINY))).model)
    config = EngineConfig(str(TINY), tp=2, device="cuda", drafter=settings(folder, placement=placement))
    with pytest.raises(
        ConfigError, match="placement = 'coordinator': must be 'workers' with 2 ranks on cuda: features"
    ):
        plan(config)
    alone = plan(dataclasses.replace(config, tp=1)).config.drafter  # one process, whose network is beside the target
    assert alone.placement == "workers"


def test_ranks_that_the_drafter_cannot_be_split_over(tmp_path):
    model = plan(EngineConfig(str(TINY))).model
    folder = drafter_folder(tmp_path, V1 | {"num_attention_heads": 3, "num_key_value_heads": 3}, model)
    with pytest.raises(ConfigError, match=r"tp = 2: the drafter .* can be split over 1 ranks"):
        plan(EngineConfig(str(TINY), tp=2, drafter=settings(folder)))


@pytest.mark.parametrize("place", [{}, HERE], ids=["workers", "coordinator"])
def test_a_draft_before_the_first_forward(loaded, place):
    """A text that the prefix cache has whole, as another request left it: its first step is a tree, drafted for."""
    drafter = loaded.settings("v1", **place)
    harness = loaded.harness(drafter)
    prompt, params = random_text(5, 60), SamplingParams(max_tokens=12, ignore_eos=True)
    first = Request(1, prompt, params)
    alone, coordinator = drafts(harness, drafter, [[first]])
    proposals = {text: proposal for text, proposal in alone.items() if len(text) == 65}
    again = Request(2, prompt, params, tokens=first.tokens[:5])
    coordinator.submit(again)
    alone.clear()
    coordinator.step()
    assert again.cached == 64 and again.forwards == 1 and len(again.drafted) > 0
    while not coordinator.idle:
        coordinator.step()
    assert again.tokens == first.tokens
    ((text, found),) = [(text, proposal) for text, proposal in alone.items() if len(text) == 65]
    size = min(len(found.lp), len(proposals[text].lp))  # the first request had a round that began there
    assert_close(found.lp[:size], proposals[text].lp[:size], atol=1e-5)
