"""INT4 in groups of 32 along a matrix's input, symmetric, as compressed-tensors packs it; and training for it."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
_LEAST_SCALE = 2.0**-100  # of a group of zeros


def quantise(w: Tensor) -> tuple[Tensor, Tensor]:
    """w [..., out, in] -> whole numbers in [-8, 7], float32 [..., out, in], and scales [..., out, in / 32], float32
    with bfloat16's values. The numbers times their scales are the values."""
    groups = w.float().reshape(*w.shape[:-1], -1, GROUP)
    scales = (groups.abs().amax(-1) / 7.5).clamp_min(_LEAST_SCALE).bfloat16().float()
    return (groups / scales[..., None]).round_().clamp_(-8, 7).view(w.shape), scales


def values(q: Tensor, scales: Tensor) -> Tensor:
    """What the numbers stand for, float32 [..., out, in]."""
    return (q.view(*scales.shape, GROUP) * scales[..., None]).view(q.shape)


def rounded(w: Tensor) -> Tensor:
    """The values that `w` will have once it is stored; the gradient goes straight through."""
    return w + (values(*quantise(w.detach())) - w.detach())


def rounded_bf16(w: Tensor) -> Tensor:
    """The same for what is stored in bfloat16."""
    return w + (w.detach().bfloat16().float() - w.detach())


def words(q: Tensor) -> Tensor:
    """int32 [..., out, in / 8] of numbers: eight nibbles of the number + 8 each, the first one lowest."""
    nibbles = (q.long() + 8).view(*q.shape[:-1], -1, 8) << torch.arange(0, 32, 4, device=q.device)
    packed = nibbles.sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).int()
