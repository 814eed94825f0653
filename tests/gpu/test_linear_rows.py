"""A row of linear or linear_heads has the same bits alone, in any batch, and at any place in it."""

from __future__ import annotations

import pytest
import torch

from kdtp.kernels.abi import DTYPES, KernelError, library

SHAPES = ((7168, 2112), (7168, 512), (256, 320), (1024, 1000), (1536, 384), (77, 130))  # in, out
BATCHES = (2, 7, 8, 9, 16, 31, 33, 64, 65, 200)


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [M, in] w [out, in] -> [M, out]."""
    y = torch.full((x.shape[0], w.shape[0]), torch.nan, dtype=x.dtype, device=x.device)
    shape = {"rows": x.shape[0], "in": w.shape[1], "out": w.shape[0], "x_stride": x.stride(0), "y_stride": w.shape[0]}
    stream = torch.cuda.current_stream().cuda_stream
    library().call("linear", stream, x=x, w=w, y=y, out_f32=0, dtype=DTYPES[x.dtype], **shape)
    return y


def linear_heads(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x [M, h, in] w [h, out, in] -> [M, h, out]."""
    y = torch.full((*x.shape[:2], w.shape[1]), torch.nan, dtype=x.dtype, device=x.device)
    strides = {"x_row": x.stride(0), "x_head": x.stride(1), "y_row": y.stride(0), "y_head": y.stride(1)}
    shape = {"rows": x.shape[0], "heads": w.shape[0], "in": w.shape[2], "out": w.shape[1]}
    stream = torch.cuda.current_stream().cuda_stream
    library().call("linear_heads", stream, x=x, w=w, y=y, dtype=DTYPES[x.dtype], **shape, **strides)
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "out"), SHAPES)
def test_linear(cuda: torch.device, width: int, out: int, dtype: torch.dtype) -> None:
    random = torch.Generator(cuda).manual_seed(width + out)
    x = torch.randn(max(BATCHES), width, generator=random, device=cuda).to(dtype)
    w = torch.randn(out, width, generator=random, device=cuda).to(dtype)
    alone = torch.cat([linear(x[i : i + 1], w) for i in range(len(x))])
    assert not alone.isnan().any()
    for rows in BATCHES:
        assert torch.equal(linear(x[:rows], w), alone[:rows]), rows
        assert torch.equal(linear(x[-rows:].flip(0), w), alone[-rows:].flip(0)), rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "width", "out"), [(8, 128, 512), (8, 512, 128), (4, 33, 20)])
def test_linear_heads(cuda: torch.device, heads: int, width: int, out: int, dtype: torch.dtype) -> None:
    random = torch.Generator(cuda).manual_seed(width + out)
    x = torch.randn(max(BATCHES), heads, width, generator=random, device=cuda).to(dtype)
    w = torch.randn(heads, out, width, generator=random, device=cuda).to(dtype)
    alone = torch.cat([linear_heads(x[i : i + 1], w) for i in range(len(x))])
    assert not alone.isnan().any()
    for rows in BATCHES:
        assert torch.equal(linear_heads(x[:rows], w), alone[:rows]), rows


@pytest.mark.parametrize("rows", [8, 16, 32, 60])
def test_a_row_among_nan(cuda: torch.device, rows: int) -> None:
    """What the other rows hold does not matter, be it NaN or infinity."""
    w = torch.randn(2112, 7168, device=cuda).to(torch.bfloat16)
    x = torch.randn(rows, 7168, device=cuda).to(torch.bfloat16)
    wild = x.clone()
    wild[::2] = torch.tensor([torch.nan, torch.inf], device=cuda).repeat(3584)
    assert torch.equal(linear(wild, w)[1::2], linear(x, w)[1::2])


def test_refusals(cuda: torch.device) -> None:
    """Rows that 16-byte loads cannot read, by name and before anything runs."""
    x, w = (torch.zeros(3, 321, dtype=torch.bfloat16, device=cuda) for _ in range(2))
    with pytest.raises(KernelError, match="linear: x strides 321, 0: must be multiples of 8"):
        linear(x[:, :320], w[:, :320].contiguous())
    with pytest.raises(KernelError, match="must be aligned to 16 bytes"):
        linear(torch.zeros(3, 328, dtype=torch.bfloat16, device=cuda)[:, 1:321], w[:, :320].contiguous())
    with pytest.raises(KernelError, match="linear_heads: heads 1025: must be 1"):
        linear_heads(torch.zeros(1, 1025, 8, device=cuda), torch.zeros(1025, 8, 8, device=cuda))
