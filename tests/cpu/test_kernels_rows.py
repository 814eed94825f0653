"""A row's result depends on that row alone: not on which rows share the call, how many, in which place, or on threads.

Sizes are odd on purpose: BLAS kernels and vector loops treat what is left over at an edge in another way.
"""

import random

import pytest
import torch
from compare import assert_same_bits

from kdtp import kernels

ROWS = 41


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def linear(dtype, width, out):
    w = draw(width, out, dtype=dtype)
    return draw(ROWS, width, dtype=dtype), lambda x, rows: kernels.linear(x, w)


def linear_heads(dtype, width, heads):
    w = draw(heads, width, 21, dtype=dtype)
    return draw(ROWS, heads, width, dtype=dtype), lambda x, rows: kernels.linear_heads(x, w)


def norm(dtype, width, _):
    weight = draw(width)
    return draw(ROWS, width, dtype=dtype), lambda x, rows: kernels.rms_norm(x, weight, 1e-6)


def silu(dtype, width, _):
    # Wide enough to be cut into parts for several threads, in the midst of rows.
    return draw(ROWS, 10 * width, dtype=dtype), lambda x, rows: kernels.silu_mul(x)


def rope(dtype, width, heads):
    cos, sin = draw(ROWS, 1, 2 * width), draw(ROWS, 1, 2 * width, seed=1)
    return draw(ROWS, heads, 2 * width, dtype=dtype), lambda x, rows: kernels.rope(x, cos[rows], sin[rows])


def router_softmax(_, width, __):
    routing = kernels.Routing(2, "softmax", 1, 1, True, 1.0)
    return draw(ROWS, width), lambda x, rows: kernels.router(x, None, routing)[1]


def router_sigmoid(_, width, __):
    routing, bias = kernels.Routing(2, "sigmoid", 1, 1, True, 2.5), draw(width)
    return draw(ROWS, width), lambda x, rows: kernels.router(x, bias, routing)[1]


def moe(dtype, width, out):
    ids = torch.stack([torch.randperm(6, generator=torch.Generator().manual_seed(i))[:3] for i in range(ROWS)])
    weights, gate_up, down = draw(ROWS, 3), draw(6, width, 2 * out, dtype=dtype), draw(6, out, width, dtype=dtype)
    return draw(ROWS, width, dtype=dtype), lambda x, rows: kernels.moe(x, ids[rows], weights[rows], gate_up, down)


OPS = [linear, linear_heads, norm, silu, rope, router_softmax, router_sigmoid, moe]


def batches():
    rng = random.Random(0)
    yield from ([i] for i in (0, 7, 8, 40))
    for size in (2, 3, 7, 8, 9, 15, 16, 17, 40):
        yield rng.sample(range(ROWS), size)
    yield [5] * 11  # the same row in every place


@pytest.mark.parametrize("threads", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "other"), [(37, 3), (64, 4), (25, 1), (257, 2)])
@pytest.mark.parametrize("op", OPS)
def test_rows_are_independent(op, width, other, dtype, threads):
    x, call = op(dtype, width, other)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = call(x, torch.arange(ROWS))
        for batch in batches():
            assert_same_bits(call(x[batch], torch.tensor(batch)), whole[batch])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("op", [linear, linear_heads, norm, silu, moe])
def test_a_broken_row_stays_alone(op):
    x, call = op(torch.float32, 37, 3)
    want = call(x, torch.arange(ROWS))
    x = x.clone()
    x[3] = torch.nan
    found = call(x, torch.arange(ROWS))
    assert found[3].isnan().all()
    others = [row for row in range(ROWS) if row != 3]
    assert_same_bits(found[others], want[others])


def test_the_bar_would_notice():
    x = draw(64, 10)
    other = x.clone()
    other[7, 3] = torch.nextafter(x[7, 3], torch.tensor(torch.inf))
    with pytest.raises(AssertionError, match=r"at \[7, 3\]"):
        assert_same_bits(other, x)
    in_order, reversed_order = sum(x.unbind(1)), sum(x.flip(1).unbind(1))
    with pytest.raises(AssertionError):
        assert_same_bits(reversed_order, in_order)
