"""Matrix products of a few rows, in tiles of fixed height."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from kdtp.kernels import cuda
from kdtp.kernels.check import FLOATS, check
from kdtp.types import TILE

# A BLAS picks its kernel, and with it the order of summation, by the shape of the product. So every product is done
# at one height: the last tile is filled up with zero rows. Within a tile, too, a row must give the same in every place:
# TILE rows are one register block of every kernel measured, while 8 are more than one in MKL's for AVX2, and not alike.

# Columns that fill no vector go through other loops, where place and address of a row may decide its bits (MKL's on
# AMD: 5 to 11 columns). So every product is of whole vectors: of 16 float32, the widest there are.
COLUMNS = 16


def linear(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w.

    x [M, in], w [in, out], float32 or bfloat16 alike -> [M, out] of that dtype. Raises as kernels.check.
    """
    if x.is_cuda:
        return cuda.linear(x, w)
    check("linear", "x", x, FLOATS, None, w.shape[0])
    check("linear", "w", w, (x.dtype,), None, None)
    wide = widened(w)
    if x.shape[0] == TILE:
        return narrowed(torch.mm(x, wide), w)
    tiles = whole_tiles(x)
    out = torch.empty(tiles.shape[0], TILE, wide.shape[1], dtype=x.dtype)
    for tile, part in zip(tiles.unbind(), out.unbind(), strict=True):
        torch.mm(tile, wide, out=part)
    return narrowed(out.view(-1, wide.shape[1])[: x.shape[0]], w)


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
    wide = widened(w)
    product = torch.cat([torch.bmm(tile.transpose(0, 1), wide) for tile in tiles], 1).transpose(0, 1)[: x.shape[0]]
    return narrowed(product, w) if out is None else out.copy_(product[..., : w.shape[2]])


def empty_weight(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Room for a weight [.., in, out]: K-major on a GPU; on a CPU each row is followed by zeros to whole COLUMNS."""
    *lead, inputs, outputs = shape
    if device.type != "cpu":
        return torch.empty(*lead, outputs, inputs, dtype=dtype, device=device).mT
    wide = torch.empty(*lead, inputs, outputs + -outputs % COLUMNS, dtype=dtype)
    wide[..., outputs:].zero_()
    return wide[..., :outputs]


def widened(w: torch.Tensor) -> torch.Tensor:
    """w [.., in, out] with `out` filled up to whole COLUMNS: by what `empty_weight` put behind a row, or in a copy."""
    spare = -w.shape[-1] % COLUMNS
    if not spare:
        return w
    wide = w.shape[-1] + spare
    if w.stride(-2) == wide and w.storage_offset() % wide == 0:
        return w.as_strided((*w.shape[:-1], wide), w.stride())
    return whole_columns(w)


def narrowed(product: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The columns that are w's, of a product with `widened(w)`."""
    out = w.shape[-1]
    return product if product.shape[-1] == out else product[..., :out].contiguous()


def whole_columns(x: torch.Tensor) -> torch.Tensor:
    """x [.., n], its last dimension filled up with zeros to whole COLUMNS."""
    spare = -x.shape[-1] % COLUMNS
    return pad(x, (0, spare)) if spare else x


def whole_tiles(x: torch.Tensor) -> torch.Tensor:
    """x [M, ...] cut into tiles [ceil(M / 4), 4, ...], the last one filled up with zeros."""
    short = -x.shape[0] % TILE
    if short:
        x = torch.cat([x, x.new_zeros(short, *x.shape[1:])])
    return x.view(-1, TILE, *x.shape[1:])
