"""The gate of a SwiGLU MLP."""

from __future__ import annotations

import torch
from torch.nn import functional

from kdtp.kernels import cuda
from kdtp.kernels.check import FLOATS, check


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where x holds gate, then up.

    x [M, 2 * I] float32 or bfloat16 -> [M, I] of that dtype. Raises as kernels.check.
    """
    if x.is_cuda:
        return cuda.silu_mul(x)
    check("silu_mul", "x", x, FLOATS, None, None)
    if x.shape[1] % 2:
        raise ValueError(f"silu_mul: x has {x.shape[1]} columns: must be even")
    # exp differs by an ulp between the vector body and the scalar tail of a loop, and which of them an element meets
    # depends on its neighbours; in float64 that ulp is gone after rounding.
    gate, up = x.double().chunk(2, -1)
    return (functional.silu(gate) * up).to(x.dtype)
