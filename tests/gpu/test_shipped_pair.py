"""The pair that ships on a GPU, in graphs and kernel by kernel: DDTree == chain == AR, and what its drafter brings."""

from __future__ import annotations

import dataclasses
from contextlib import closing

import pytest
import torch

from kdtp import pair
from kdtp.model.comm import Solo
from kdtp.model.moe import Int4Experts
from kdtp.model.shard import Shard
from kdtp.model.weights.load import Weights, open_model
from kdtp.types import SamplingParams
from tests import pair_cases
from tests.harness import NONE, Harness

pytestmark = pytest.mark.timeout(300)


def on_gpu(dtype: str, graphs: bool) -> Harness:
    return pair_cases.harness(device="cuda", dtype=dtype, graphs=graphs, kv_tokens=1 << 14)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_gives_the_text_and_the_bits_of_plain_decoding(dtype, graphs, temperature, capsys):
    with closing(on_gpu(dtype, graphs)) as ranks:
        found = pair_cases.check(ranks, temperature, tokens=48)
    with capsys.disabled():
        rates = ", ".join(f"{way} {rate:.2f}" for way, rate in found.items())
        print(f"pair {dtype} {'graphs' if graphs else 'eager'} T={temperature}: tokens per round: {rates}")
    assert found["budget 0"] == 1.0
    assert found["budget 16"] > found["chain"] > 1.8 and found["budget 16"] > found["budget 4"], found


def test_float32_writes_what_the_cpu_writes():
    """Greedy text of both; logits near each other. The pair has no near-tie in these texts."""
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    with closing(pair_cases.harness()) as cpu:
        want = cpu.run(pair_cases.prompts(), params, NONE)
    with closing(on_gpu("float32", True)) as gpu:
        found = gpu.run(pair_cases.prompts(), params, gpu.config.drafter)
    for got, there in zip(found, want, strict=True):
        assert got.tokens == there.tokens
        assert abs(got.logits - there.logits).max() < 1e-3


def test_experts_stay_in_int4_in_bfloat16():
    with open_model(pair.TARGET) as source:
        weights = Weights(source, 0, 1, "bfloat16", lambda done, total: None, torch.device("cuda"))
        shard = Shard(weights, Solo(), 2)
    assert all(isinstance(layer.mlp.experts, Int4Experts) for layer in shard._layers[1:])


def test_widths_by_measured_cost_give_the_text_of_plain_decoding():
    params = SamplingParams(max_tokens=96, ignore_eos=True)
    with closing(on_gpu("bfloat16", True)) as ranks:
        plain = ranks.run(pair_cases.prompts(), params, NONE)
        drafter = dataclasses.replace(ranks.config.drafter, budget=32, width="auto")
        done = ranks.run(pair_cases.prompts(), params, drafter)
    assert [d.tokens for d in done] == [d.tokens for d in plain]
