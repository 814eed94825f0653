"""Grouped dynamic causal convolution over blocks of slots, of DFlash 2."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from kdtp.kernels.abi import DTYPES, Fields, library
from kdtp.kernels.check import FLOATS, check_at


def convolve(x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor, side: int, n: int) -> torch.Tensor:
    """Tap t multiplies the slot t places before by base[side, t] plus what `dynamic` has for the slot, if the block has
    that slot; the sum over all taps.

    x [B * n, H], dynamic [B * n, 2 * taps * groups] (side, tap, group; a group is H / groups channels side by side),
    base [2, taps, H], float32 or bfloat16 alike; side 0 or 1 -> [B * n, H]. Factors and products are rounded to the
    dtype, sums are not before they are whole. Raises TypeError for a dtype, ValueError for another form, KernelError
    for a size beyond csrc/params.h.
    """
    if x.dtype not in FLOATS:
        raise TypeError(f"convolve: x is {x.dtype}: must be {' or '.join(map(str, FLOATS))}")
    check = partial(check_at, "convolve", x.device)
    rows, width = check("x", x, x.dtype, None, None)
    sides, taps, _ = check("base", base, x.dtype, 2, None, width)
    each = check("dynamic", dynamic, x.dtype, rows, None)[1]
    groups = each // (sides * taps) if taps else 0
    if groups < 1 or each % (sides * taps) or width % groups:
        raise ValueError(f"convolve: dynamic has {each} columns: must be {sides} * {taps} * a divisor of {width}")
    if side not in (0, 1):
        raise ValueError(f"convolve: side {side}: must be 0 or 1")
    if n < 1 or rows % n:
        raise ValueError(f"convolve: n {n}: must be a divisor of the rows, {rows}")
    if x.is_cuda:
        return _in_cuda(x, dynamic, base, groups, side, n)
    factors = base[side] + _spread(dynamic.view(rows, sides, taps, groups)[:, side], width)
    blocks = x.view(-1, n, width)
    shifted = [functional.pad(blocks, (0, 0, t, 0))[:, :n] for t in range(taps)]
    return (torch.stack(shifted, 2).view(factors.shape) * factors).sum(1)


def _in_cuda(
    x: torch.Tensor, dynamic: torch.Tensor, base: torch.Tensor, groups: int, side: int, n: int
) -> torch.Tensor:
    out = torch.empty_like(x)
    tensors: Fields = {"x": x, "dynamic": dynamic, "base": base, "out": out}
    shape: Fields = {"rows": x.shape[0], "width": x.shape[1], "taps": base.shape[1], "groups": groups}
    stream = torch.cuda.current_stream(x.device).cuda_stream
    library().call("convolve", stream, **tensors, **shape, side=side, n=n, dtype=DTYPES[x.dtype])
    return out


def _spread(dynamic: torch.Tensor, width: int) -> torch.Tensor:
    """[M, taps, groups] for each channel: [M, taps, width]."""
    groups = dynamic.shape[2]
    return dynamic[..., None].expand(-1, -1, -1, width // groups).flatten(2)
