"""RMS norm, with and without the residual sum."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.gpu.cases import BF16, F32, Case, Output, f32, typed

EPS = 1e-5
TOLERANCE = {F32: (1e-6, 1e-6), BF16: (1e-6, 2.0**-7)}  # an ulp of bfloat16: its rounding may fall either way


def cases() -> Iterator[Case]:
    """Widths around the block's size, the models' own, and the largest."""
    rng = np.random.default_rng(1)
    for dtype in (F32, BF16):
        for rows, width in ((1, 1), (3, 31), (5, 256), (2, 257), (17, 576), (8, 2048), (64, 7168), (2, 16384), (0, 64)):
            for add in (False, True):
                yield _case(rng, rows, width, dtype, add)


def _case(rng: np.random.Generator, rows: int, width: int, dtype: int, add: bool) -> Case:
    gap = 0 if add else 64  # between rows of x
    spread = np.full((rows, width + gap), np.nan)
    spread[:, :width] = rng.standard_normal((rows, width)) * 3
    x = typed(spread, dtype)
    residual = typed(rng.standard_normal((rows, width)), dtype)
    weight = rng.standard_normal(width).astype(np.float32)
    total = f32(typed(f32(x) + f32(residual), dtype)) if add else f32(x)[:, :width]
    wide = total.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight
    atol, rtol = TOLERANCE[dtype]
    outputs = {"out": Output(typed(normed, dtype), atol, rtol)}
    if add:
        outputs["residual"] = Output(typed(total, dtype), initial=residual)
    name = f"rms_norm-{'add-' if add else ''}{rows}x{width}-{'bf16' if dtype else 'f32'}"
    scalars = {"rows": rows, "width": width, "x_stride": width + gap, "eps": EPS, "dtype": dtype}
    return Case(name, "rms_norm", scalars, {"x": x, "weight": weight}, outputs)
