"""RMS normalisation."""

from __future__ import annotations

import torch

from kdtp.kernels import cuda
from kdtp.kernels.check import FLOAT32, FLOATS, check


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32.

    x [M, H] float32 or bfloat16, weight [H] float32 -> [M, H] of x's dtype. Raises as kernels.check.
    """
    if x.is_cuda:
        return cuda.rms_norm(x, weight, eps)
    check("rms_norm", "x", x, FLOATS, None, None)
    check("rms_norm", "weight", weight, FLOAT32, x.shape[1])
    h = x.float()
    # Division and square root are correctly rounded, in the vector body and in the scalar tail of a loop alike.
    return (h / ((h * h).mean(-1, keepdim=True) + eps).sqrt_() * weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new residual x + residual, and its RMS norm.

    x, residual [M, H] of one dtype, weight [H] float32 -> two [M, H] of that dtype. On a GPU the sum replaces
    `residual` in place. Raises as kernels.check.
    """
    if x.is_cuda:
        return residual, cuda.rms_norm(x, weight, eps, residual)
    check("add_rms_norm", "residual", residual, (x.dtype,), *x.shape)
    total = x + residual
    return total, rms_norm(total, weight, eps)
