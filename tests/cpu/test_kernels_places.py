"""A row gives the same bits at every place and address, for matrices of every width: the BLAS must have no say.

test_kernels_blas.py runs all of this once more for other CPUs.
"""

import pytest
import torch
from compare import assert_same_bits

from kdtp import kernels
from kdtp.types import MOST_THREADS

WIDTHS = [*range(1, 50), 69, 100, 112, 257]  # of a result
INPUTS = [8, 25, 64]
PLACES = 9  # of the same rows in one call: in every place of a tile, in several tiles
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True, params=[1, 4, MOST_THREADS])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_alike(rows):
    assert_same_bits(rows, rows[:1].expand_as(rows))


def repeated(row):
    return row.expand(PLACES, *row.shape[1:]).contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inputs", INPUTS)
def test_linear(inputs, dtype):
    for width in WIDTHS:
        w = draw(inputs, width, dtype=dtype)
        found = kernels.linear(repeated(draw(1, inputs, dtype=dtype)), w)
        assert_alike(found)
        assert_same_bits(kernels.linear(draw(1, inputs, dtype=dtype), in_place(w)), found[:1])


@pytest.mark.parametrize("heads", [1, 2])
def test_what_is_large_enough_for_many_threads(heads):
    for inputs, width in [(1000, 96), (1000, 512), (2048, 256), (2048, 384), (2048, 1024)]:
        w = draw(heads, inputs, width)
        row = draw(1, heads, inputs)
        assert_alike(kernels.linear_heads(repeated(row), w))
        assert_alike(kernels.linear(repeated(row[:, 0]), w[0]))


def in_place(w):
    """As the loader has it: what it adds behind a row is not 0 here, and must not matter."""
    room = kernels.empty_weight(w.shape, w.dtype, w.device)
    if room.untyped_storage().nbytes() > w.untyped_storage().nbytes():
        room.as_strided((room.untyped_storage().nbytes() // room.element_size(),), (1,)).fill_(torch.nan)
    return room.copy_(w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3])
def test_linear_heads(heads, dtype):
    for width in WIDTHS:
        w = draw(heads, 25, width, dtype=dtype)
        found = kernels.linear_heads(repeated(draw(1, heads, 25, dtype=dtype)), w)
        assert_alike(found)
        into = torch.empty_like(found)
        assert kernels.linear_heads(repeated(draw(1, heads, 25, dtype=dtype)), in_place(w), into) is into
        assert_same_bits(into, found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_moe(dtype):
    for width in WIDTHS:
        gate_up, down = draw(2, 25, 2 * width, dtype=dtype), draw(2, width, 25, dtype=dtype)
        ids, weights = torch.tensor([[1, 0]]), torch.tensor([[0.7, 0.4]])
        args = [repeated(x) for x in (draw(1, 25, dtype=dtype), ids, weights)]
        found = kernels.moe(*args, gate_up, down)
        assert_alike(found)
        assert_same_bits(kernels.moe(*args, in_place(gate_up), in_place(down)), found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [1, 3, 4])
def test_mla_tree(heads, dtype):
    for latent in WIDTHS:
        kv = draw(70, latent + 6, dtype=dtype)
        q = repeated(draw(1, heads, latent + 6, dtype=dtype))
        keys = kernels.plan_keys([torch.arange(70)] * PLACES, [[-1]] * PLACES)
        assert_alike(kernels.mla_tree(q, kv, keys, 0.4, latent))
