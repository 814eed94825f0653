"""SiLU times up."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.gpu.cases import BF16, F32, Case, Output, f32, typed

TOLERANCE = {F32: 1e-6, BF16: 2.0**-7}  # an ulp of bfloat16: its rounding may fall either way


def cases() -> Iterator[Case]:
    """Widths that are and are not whole 16 bytes, the models' own, and values far out."""
    rng = np.random.default_rng(2)
    shapes = ((1, 1), (3, 31), (5, 12), (7, 256), (64, 256), (1, 2304), (33, 2304), (2, 18432), (300, 1001), (0, 64))
    for dtype in (F32, BF16):
        for rows, width in shapes:
            yield _case("", rng.standard_normal((rows, 2 * width)) * 3, dtype)
        yield _case("far-", _far(rng), dtype)


def _far(rng: np.random.Generator) -> np.ndarray:
    x = rng.standard_normal((4, 2 * 40))
    x[:, :6] = [1e4, -1e4, 80.0, -80.0, 0.0, -0.0]
    x[1, 7], x[2, 47], x[3, 8] = np.nan, np.nan, np.inf
    return x


def _case(kind: str, values: np.ndarray, dtype: int) -> Case:
    x = typed(values, dtype)
    gate, up = np.split(f32(x).astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        y = gate / (1 + np.exp(-gate)) * up
    rows, width = y.shape
    scalars = {"rows": rows, "width": width, "dtype": dtype}
    name = f"silu_mul-{kind}{rows}x{width}-{'bf16' if dtype else 'f32'}"
    return Case(name, "silu_mul", scalars, {"x": x}, {"out": Output(typed(y, dtype), 1e-30, TOLERANCE[dtype])})
