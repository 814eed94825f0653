"""INT4 experts through kernels.cuda: repacked and multiplied as the published packing says, in float64."""

from __future__ import annotations

import pytest
import torch

from kdtp.kernels import cuda
from kdtp.kernels.abi import KernelError

EXPERTS, HIDDEN, INTER, TOPK = 16, 256, 128, 4


def experts(outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    packed = torch.randint(-(2**31), 2**31 - 1, (EXPERTS, outputs, inputs // 8)).int()
    scales = (torch.rand(EXPERTS, outputs, inputs // 32) + 0.5) / (4.6 * inputs**0.5)
    return packed.cuda(), scales.bfloat16().cuda()


def dense(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float64 [E, out, in]."""
    shifts = 4 * torch.arange(8, device=packed.device)
    nibbles = (packed.long().unsqueeze(-1) >> shifts & 15).flatten(2) - 8
    return nibbles.double() * scales.double().repeat_interleave(32, 2)


def weighted_sum(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """float64 [rows, hidden]."""
    want = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for k in range(ids.shape[1]):
        gate, up = torch.einsum("rh,roh->ro", x.double(), dense(*gate_up)[ids[:, k].long()]).chunk(2, 1)
        inner = torch.nn.functional.silu(gate) * up
        want += weights[:, k : k + 1] * torch.einsum("ri,roi->ro", inner, dense(*down)[ids[:, k].long()])
    return want


@pytest.mark.parametrize("rows", [0, 1, 5, 64])
def test_is_the_weighted_sum_of_the_experts(rows):
    torch.manual_seed(rows)
    gate_up, down = experts(2 * INTER, HIDDEN), experts(HIDDEN, INTER)
    x = torch.randn(rows, HIDDEN).bfloat16().cuda()
    ids = torch.rand(rows, EXPERTS).topk(TOPK).indices.sort(1).values.int().cuda()
    weights = torch.rand(rows, TOPK).cuda()
    out = cuda.moe_int4(x, ids, weights, *cuda.repack(*gate_up), *cuda.repack(*down))
    want = weighted_sum(x, ids, weights, gate_up, down)
    assert out.shape == x.shape and out.dtype == x.dtype
    assert (out.double() - want).norm() <= 1e-2 * want.norm()


def test_refuses_experts_of_other_shapes():
    gate_up, down = experts(2 * INTER, HIDDEN), experts(HIDDEN, INTER)
    x, ids, weights = torch.zeros(1, HIDDEN).bfloat16().cuda(), torch.zeros(1, 1).int().cuda(), torch.ones(1, 1).cuda()
    with pytest.raises(KernelError, match="moe_int4: packed and scales are"):
        cuda.moe_int4(x, ids, weights, *gate_up, down[0], gate_up[1])
    with pytest.raises(KernelError, match="repack: packed and scales are"):
        cuda.repack(gate_up[0].float(), gate_up[1])
