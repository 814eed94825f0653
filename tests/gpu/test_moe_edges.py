"""INT4 experts at their limits: inputs, inner values and scales of any size, rows and choices of any number, and what
other kernels leave for them only just in time."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kdtp import kernels
from kdtp.kernels import cuda as ops
from tests.gpu.test_moe_int4 import EXPERTS, HIDDEN, INTER, TOPK, experts, weighted_sum
from tests.gpu.test_moe_rows import Experts, packed, run

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
ROWS = (1, 5, 15, 64)  # no list of items; one tile of rows, few columns and many; two tiles


def rows_of(random: torch.Generator, count: int, experts: int = EXPERTS, topk: int = TOPK, hidden: int = 1024) -> Rows:
    """x between 0.5 and 1.5 or their negatives, so that its smallest and largest are known; ids and weights."""
    device = random.device
    x = (torch.rand(count, hidden, generator=random, device=device) + 0.5).to(torch.bfloat16)
    x *= torch.randint(0, 2, x.shape, generator=random, device=device) * 2 - 1
    ids = torch.rand(count, experts, generator=random, device=device).topk(topk).indices.to(torch.int32)
    return x, ids, torch.rand(count, topk, generator=random, device=device) + 0.1


def scaled(made: Experts, gate: int, up: int, down: int) -> Experts:
    """Scales times powers of two."""
    assert made.s_gate_up is not None and made.s_down is not None
    s_gate_up = made.s_gate_up.view(made.count, 2, -1) * torch.tensor([2.0**gate, 2.0**up]).to(made.s_gate_up)[:, None]
    return replace(made, s_gate_up=s_gate_up.flatten(), s_down=made.s_down * 2.0**down)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("x", "gate", "up", "down"),
    [
        (63, -63, -63, 0), (-56, 56, 56, 0), (0, 0, 55, -55), (0, 0, -20, 20), (63, -63, -8, -55),
        (0, 0, 0, 60), (0, 0, 0, -40), (-56, 56, 76, 20),
    ],
)  # fmt: skip
def test_powers_of_two_change_no_bit(cuda: torch.device, rows: int, x: int, gate: int, up: int, down: int) -> None:
    """Up to the ends of what the inputs of either product may be, docs/checkpoints.md."""
    random = torch.Generator(cuda).manual_seed(rows)
    made, (values, ids, weights) = packed(random, 1024, 128), rows_of(random, rows)
    plain = run(values, ids, weights, made)
    assert plain.isfinite().all() and plain.abs().max() > 0.1
    found = run(values * 2.0**x, ids, weights, scaled(made, gate, up, down))
    assert torch.equal(found, plain * 2.0 ** (x + up + down))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("value", [2.0**64, -3e38, torch.inf, -torch.inf, torch.nan])
def test_an_input_that_cannot_be_makes_its_row_nan(cuda: torch.device, rows: int, value: float) -> None:
    """Not a wrong number, and no other row."""
    random = torch.Generator(cuda).manual_seed(rows)
    made, (x, ids, weights) = packed(random, 1024, 128), rows_of(random, rows)
    want = run(x, ids, weights, made)
    want[rows // 2] = torch.nan
    x[rows // 2, 333] = value
    assert torch.equal(run(x, ids, weights, made).nan_to_num(7e7), want.nan_to_num(7e7))


@pytest.mark.parametrize("rows", ROWS)
def test_an_inner_value_that_cannot_be_makes_the_rows_of_its_expert_nan(cuda: torch.device, rows: int) -> None:
    random = torch.Generator(cuda).manual_seed(rows)
    made, (x, ids, weights) = packed(random, 1024, 128), rows_of(random, rows)
    want = run(x, ids, weights, made)
    want[(ids == ids[0, 0]).any(1)] = torch.nan
    assert made.s_gate_up is not None
    s_gate_up = made.s_gate_up.clone()
    s_gate_up.view(made.count, 2, -1)[int(ids[0, 0]), 1] *= 2.0**75
    found = run(x, ids, weights, replace(made, s_gate_up=s_gate_up))
    assert torch.equal(found.nan_to_num(7e7), want.nan_to_num(7e7))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("value", [0.0, -0.0, 2.0**-133, -(2.0**-126), 2.0**-110])
def test_nothing_comes_of_nothing(cuda: torch.device, rows: int, value: float) -> None:
    random = torch.Generator(cuda).manual_seed(rows)
    made, (x, ids, weights) = packed(random, 1024, 128), rows_of(random, rows)
    assert not run(x.fill_(value), ids, weights, made).any()


@pytest.mark.parametrize("rows", ROWS)
def test_scales_of_any_sign_and_size(cuda: torch.device, rows: int) -> None:
    """Each output has scales of its own size; of all groups, some are negative and some zero."""
    torch.manual_seed(rows)
    gate_up, down = experts(2 * INTER, HIDDEN), experts(HIDDEN, INTER)
    for _, scales in (gate_up, down):
        scales *= torch.tensor([1.0, -1.0, 0.0, 1.0], device=cuda)[torch.randint(0, 4, scales.shape)]
    sizes = torch.randint(-40, 41, (HIDDEN,), device=cuda)
    down[1].mul_((2.0**sizes)[:, None].bfloat16())
    x, ids, weights = rows_of(torch.Generator(cuda).manual_seed(rows), rows, hidden=HIDDEN)
    want = weighted_sum(x, ids, weights, gate_up, down) / 2.0**sizes
    found = ops.moe_int4(x, ids, weights, *ops.repack(*gate_up), *ops.repack(*down))
    assert (found / 2.0**sizes - want).norm() <= 1e-2 * want.norm()
    opposite = ops.moe_int4(x, ids, weights, *ops.repack(*gate_up), *ops.repack(down[0], -down[1]))
    assert torch.equal(opposite, -found)


@pytest.mark.parametrize(("count", "topk"), [(384, 8), (1, 1), (3, 1)])
def test_any_number_of_rows(cuda: torch.device, count: int, topk: int) -> None:
    """Of many experts with few rows each, and of few that have them all: items with one pair to sixteen."""
    random = torch.Generator(cuda).manual_seed(count)
    made = packed(random, 256, 64, count)
    x, ids, weights = rows_of(random, 512, count, topk, 256)
    alone = torch.cat([run(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], made) for i in range(512)])
    for rows in (2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 512):
        assert torch.equal(run(x[:rows], ids[:rows], weights[:rows], made), alone[:rows]), rows


@pytest.mark.parametrize(("count", "topk"), [(2, 12), (1, 4), (8, 64)])
def test_more_choices_than_experts(cuda: torch.device, count: int, topk: int) -> None:
    """Most of them nobody's, some of them the same: a row alone has an item for each."""
    random = torch.Generator(cuda).manual_seed(topk)
    made, (x, _, weights) = packed(random, 320, 64, count), rows_of(random, 2, topk, topk, 320)
    ids = torch.randint(-2, count, (2, topk), generator=random, device=cuda, dtype=torch.int32)
    ids[:, -1] = 0  # the last one counts
    together = run(x, ids, weights, made)
    for i in range(2):
        assert torch.equal(run(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], made)[0], together[i]), i


@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_replay_waits_for_what_it_reads(cuda: torch.device, rows: int) -> None:
    """Inputs, choices and what is added come late, each from a kernel of the same graph, on two streams."""
    torch.manual_seed(rows)
    matrices = [*ops.repack(*experts(2 * INTER, HIDDEN)), *ops.repack(*experts(HIDDEN, INTER))]
    hidden, shared = (torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=cuda) for _ in range(2))
    logits, norm = torch.zeros(rows, EXPERTS, device=cuda), torch.ones(HIDDEN, device=cuda)
    rule, side = kernels.Routing(TOPK, "softmax", 1, 1, False, 1.0), torch.cuda.Stream()

    def step(cycles: int) -> torch.Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2 * cycles)
            add = shared + 1.0
            ready = side.record_event()
        torch.cuda._sleep(cycles)
        x = kernels.rms_norm(hidden, norm, 1e-6)
        ids, weights = kernels.router(logits, None, rule)
        return ops.moe_int4(x, ids, weights, *matrices, add, ready)

    step(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(300_000)
    for _ in range(4):
        for tensor in (hidden, shared, logits):
            tensor.normal_()
        graph.replay()
        x, (ids, weights) = kernels.rms_norm(hidden, norm, 1e-6), kernels.router(logits, None, rule)
        torch.cuda.synchronize()
        assert torch.equal(found, ops.moe_int4(x, ids, weights, *matrices, shared + 1.0))
