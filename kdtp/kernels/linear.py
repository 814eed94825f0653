"""Matrix products of a few rows, in tiles of fixed height."""

from __future__ import annotations

import torch

from kdtp.kernels import cuda
from kdtp.kernels.check import FLOATS, check

# A BLAS picks its kernel, and with it the order of summation, by the shape of the product. So every product is done
# at one height: the last tile is filled up with zero rows. Within a tile, too, a row must give the same in every place:
# 4 rows are one register block of every kernel measured (MKL's for AVX-512, AVX2 and SSE4.2), while 8 are more than
# one with AVX2, and not alike.
TILE = 4


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.

    x [M, in], w [in, out], float32 or bfloat16 alike -> [M, out] of that dtype. Raises as kernels.check.
    """
    if x.is_cuda:
        return cuda.linear(x, w)
    check("linear", "x", x, FLOATS, None, w.shape[0])
    check("linear", "w", w, (x.dtype,), None, None)
    if x.shape[0] == TILE:
        return torch.mm(x, w)
    tiles = whole_tiles(x)
    out = torch.empty(tiles.shape[0], TILE, w.shape[1], dtype=x.dtype)
    for tile, part in zip(tiles.unbind(), out.unbind(), strict=True):
        torch.mm(tile, w, out=part)
    return out.view(-1, w.shape[1])[: x.shape[0]]


def linear_heads(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """x[:, i] @ w[i] for each head i.

    x [M, h, in] (rows of a head may be strided), w [h, in, out] -> [M, h, out], written into `out` if that is given.
    Raises as kernels.check.
    """
    if x.is_cuda:
        return cuda.linear_heads(x, w, out)
    check("linear_heads", "x", x, FLOATS, None, w.shape[0], w.shape[1])
    check("linear_heads", "w", w, (x.dtype,), None, None, None)
    tiles = [x] if x.shape[0] == TILE else whole_tiles(x).unbind()
    product = torch.cat([torch.bmm(tile.transpose(0, 1), w) for tile in tiles], 1).transpose(0, 1)[: x.shape[0]]
    return product if out is None else out.copy_(product)


def stored(w: torch.Tensor) -> torch.Tensor:
    """A weight [.., in, out] laid out as the ops of its device read it: K-major on a GPU, as it is on a CPU."""
    return cuda.stored(w) if w.is_cuda else w


def whole_tiles(x: torch.Tensor) -> torch.Tensor:
    """x [M, ...] cut into tiles [ceil(M / 4), 4, ...], the last one filled up with zeros."""
    short = -x.shape[0] % TILE
    if short:
        x = torch.cat([x, x.new_zeros(short, *x.shape[1:])])
    return x.view(-1, TILE, *x.shape[1:])
