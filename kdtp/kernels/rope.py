"""Rotary position embedding, NeoX order: entry j of a vector turns with entry j + d/2."""

from __future__ import annotations

import torch

from kdtp.kernels.check import FLOAT32, FLOATS, check


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each head's vector by its row's angles, in float32.

    x [M, h, d] float32 or bfloat16; cos, sin [M, 1, d] float32: the cosines twice, and minus the sines then the sines
    -> [M, h, d] of x's dtype. Raises as kernels.check.
    """
    check("rope", "x", x, FLOATS, None, None, None)
    check("rope", "cos", cos, FLOAT32, x.shape[0], 1, x.shape[2])
    check("rope", "sin", sin, FLOAT32, x.shape[0], 1, x.shape[2])
    h = x.float()
    swapped = h.roll(h.shape[2] // 2, -1)
    return (h * cos + swapped * sin).to(x.dtype)
