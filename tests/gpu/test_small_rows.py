"""A row of the small ops has the same bits alone, in any batch, and at any place in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from kdtp import kernels
from kdtp.kernels import cuda as ops

BATCHES = (2, 7, 33)
Run = Callable[..., Sequence[torch.Tensor]]  # tensors [M, ..] -> tensors [M, ..]


def assert_rows_stand_alone(run: Run, *inputs: torch.Tensor) -> None:
    """What `run` gives for a row does not depend on the others."""
    alone = [torch.cat(parts) for parts in zip(*(run(*(x[i : i + 1] for x in inputs)) for i in range(33)), strict=True)]
    for rows in BATCHES:
        for place in (slice(rows), slice(33 - rows, None)):
            for found, want in zip(run(*(x[place] for x in inputs)), alone, strict=True):
                assert same_bits(found, want[place]), rows
        for found, want in zip(run(*(x[:rows].flip(0) for x in inputs)), alone, strict=True):
            assert same_bits(found.flip(0), want[:rows]), rows


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def normal(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator(device).manual_seed(shape[-1]), device=device) * 3).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [256, 2304, 33])
def test_silu_mul(cuda: torch.device, width: int, dtype: torch.dtype) -> None:
    assert_rows_stand_alone(lambda x: [kernels.silu_mul(x)], normal(cuda, 33, 2 * width, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [576, 7168, 33])
def test_rms_norm(cuda: torch.device, width: int, dtype: torch.dtype) -> None:
    weight = normal(cuda, width)
    assert_rows_stand_alone(lambda x: [kernels.rms_norm(x, weight, 1e-5)], normal(cuda, 33, width, dtype=dtype))
    x = normal(cuda, 33, 2 * width, dtype=dtype)[:, :width]  # rows with gaps
    assert same_bits(kernels.rms_norm(x, weight, 1e-5), kernels.rms_norm(x.contiguous(), weight, 1e-5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "nope", "rope", "lora"), [(8, 128, 64, 512), (3, 5, 6, 37)])
def test_mla_prep(cuda: torch.device, heads: int, nope: int, rope: int, lora: int, dtype: torch.dtype) -> None:
    weight, angles = normal(cuda, lora), normal(cuda, 33, rope // 2)

    def run(q: torch.Tensor, new: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        kv = torch.zeros(100, lora + rope, dtype=dtype, device=cuda)
        where = torch.arange(90, 90 - 2 * len(q), -2, device=cuda)
        absorbed = kernels.mla_prep(q, new, weight, 1e-6, cos, sin, where, kv)
        return [absorbed[..., lora:], kv[where]]

    q, new = normal(cuda, 33, heads, nope + rope, dtype=dtype), normal(cuda, 33, lora + rope, dtype=dtype)
    assert_rows_stand_alone(run, q, new, angles.cos(), angles.sin())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 4, 32), (4, 1, 128), (3, 2, 66)])
def test_gqa_prep(cuda: torch.device, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
    weights, angles = (normal(cuda, width), normal(cuda, width) + 1), normal(cuda, 33, width // 2)

    def run(q: torch.Tensor, kv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor]:
        queries, (keys, values) = kernels.gqa_prep(q, kv, *weights, 1e-6, cos, sin)
        assert same_bits(kernels.gqa_prep_kv(kv, weights[1], 1e-6, cos, sin), torch.stack([keys, values]))
        return [queries, keys, values]

    q, kv = normal(cuda, 33, heads, width, dtype=dtype), normal(cuda, 33, 2 * kv_heads, width, dtype=dtype)
    assert_rows_stand_alone(run, q, kv, angles.cos(), angles.sin())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "width", "taps", "groups"), [(8, 256, 2, 16), (3, 33, 4, 11)])
def test_convolve(cuda: torch.device, n: int, width: int, taps: int, groups: int, dtype: torch.dtype) -> None:
    """A row here is a block."""
    base = normal(cuda, 2, taps, width, dtype=dtype)

    def run(x: torch.Tensor, dynamic: torch.Tensor) -> list[torch.Tensor]:
        flat = x.flatten(0, 1), dynamic.flatten(0, 1), base
        return [kernels.convolve(*flat, side, n).view(x.shape) for side in (0, 1)]

    x, dynamic = normal(cuda, 33, n, width, dtype=dtype), normal(cuda, 33, n, 2 * taps * groups, dtype=dtype)
    assert_rows_stand_alone(run, x, dynamic)


@pytest.mark.parametrize(
    ("experts", "rule"),
    [
        (384, kernels.Routing(8, "sigmoid", 1, 1, True, 2.827)),
        (256, kernels.Routing(8, "sigmoid", 8, 4, True, 2.5)),
        (160, kernels.Routing(6, "softmax", 8, 3, False, 16.0)),
    ],
)
def test_router(cuda: torch.device, experts: int, rule: kernels.Routing) -> None:
    bias = normal(cuda, experts) / 10 if rule.scoring_func == "sigmoid" else None
    assert_rows_stand_alone(lambda x: kernels.router(x, bias, rule), normal(cuda, 33, experts))


@pytest.mark.parametrize("vocab", [512, 20480, 32770, 163840])
def test_topk_and_argmax(cuda: torch.device, vocab: int) -> None:
    """Rows of an odd stride too, which are read otherwise."""
    logits = normal(cuda, 33, vocab)
    wider = normal(cuda, 33, vocab + 1)[:, :vocab]
    for x in (logits, wider):
        assert_rows_stand_alone(lambda x: kernels.topk_logsumexp(x, 64), x)
        assert_rows_stand_alone(lambda x: ops.argmax(x, 0), x)
    for found, want in zip(
        kernels.topk_logsumexp(wider, 64), kernels.topk_logsumexp(wider.contiguous(), 64), strict=True
    ):
        assert same_bits(found, want)
