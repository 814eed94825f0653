"""linear and linear_heads: plain and tensor-core forms, odd sizes, strides, a TP=8 rank's sizes of Kimi K2.6."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.gpu.cases import BF16, F32, Array, Case, Output, f32, typed

# Outputs are near 1. Sums of thousands of terms in float32; near a border one may be rounded to the next bfloat16.
TOLERANCE = {F32: (1e-5, 1e-5), BF16: (1e-5, 2.0**-7)}

ODD = ((0, 64, 32), (1, 1, 1), (1, 33, 5), (3, 31, 257), (7, 90, 130), (9, 1000, 17), (65, 67, 3))  # rows, in, out
MODELS = ((1, 256, 80), (5, 256, 96), (17, 64, 256), (8, 128, 64), (64, 256, 320), (2, 32, 1), (3, 2080, 40))
RANKS = (
    (8, 7168, 2112),
    (1, 1536, 1536),
    (33, 1024, 7168),
    (16, 7168, 512),
    (64, 256, 7168),
    (2, 7168, 384),
    (70, 2304, 1000),
)
HEADS = (
    (0, 2, 8, 8),
    (1, 4, 32, 64),
    (5, 3, 17, 9),
    (9, 4, 64, 32),
    (16, 8, 128, 512),
    (64, 8, 512, 128),
    (2, 5, 96, 33),
)


def cases() -> Iterator[Case]:
    """Every form and every tile of rows; inputs of odd strides lie between NaN."""
    rng = np.random.default_rng(2)
    for dtype in (F32, BF16):
        for rows, width, out in ODD + MODELS:
            yield _linear(rng, rows, width, out, dtype, gap=0)
            yield _linear(rng, rows, width, out, dtype, gap=24)
        for rows, heads, width, out in HEADS:
            yield _heads(rng, rows, heads, width, out, dtype)
    for rows, width, out in RANKS:
        yield _linear(rng, rows, width, out, BF16, gap=8)
    yield _linear(rng, 4, 1536, 384, BF16, gap=0, out_f32=1)
    yield _linear(rng, 3, 1001, 12, BF16, gap=1, out_f32=1)
    yield _linear(rng, 16, 7168, 384, F32, gap=0)  # a float32 router


def _linear(rng: np.random.Generator, rows: int, width: int, out: int, dtype: int, gap: int, out_f32: int = 0) -> Case:
    x = _spread(rng, (rows, width), (width + gap,), dtype)
    w = typed(rng.standard_normal((out, width), np.float32) / np.sqrt(width, dtype=np.float32), dtype)
    y = np.full((rows, out + gap), np.nan, np.float32)
    y[:, :out] = f32(x)[:, :width].astype(np.float64) @ f32(w).astype(np.float64).T
    kind = F32 if out_f32 else dtype
    expected = Output(typed(y, kind), *TOLERANCE[kind], initial=typed(np.full_like(y, np.nan), kind))
    scalars = {"rows": rows, "in": width, "out": out, "x_stride": width + gap, "y_stride": out + gap}
    name = f"linear-{rows}x{width}x{out}-gap{gap}-{'bf16' if dtype else 'f32'}{'-f32' if out_f32 else ''}"
    return Case(name, "linear", scalars | {"out_f32": out_f32, "dtype": dtype}, {"x": x, "w": w}, {"y": expected})


def _heads(rng: np.random.Generator, rows: int, heads: int, width: int, out: int, dtype: int) -> Case:
    """x is the first part of each head's row, y the first part of a wider one, as attention has them."""
    x = _spread(rng, (rows, heads, width), (heads, width + 64), dtype)
    w = typed(rng.standard_normal((heads, out, width), np.float32) / np.sqrt(width, dtype=np.float32), dtype)
    y = np.full((rows, heads, out + 16), np.nan, np.float32)
    y[..., :out] = np.einsum("rhi,hoi->rho", f32(x)[..., :width].astype(np.float64), f32(w).astype(np.float64))
    expected = Output(typed(y, dtype), *TOLERANCE[dtype], initial=typed(np.full_like(y, np.nan), dtype))
    scalars = {"rows": rows, "heads": heads, "in": width, "out": out, "x_row": heads * (width + 64)}
    scalars |= {"x_head": width + 64, "y_row": heads * (out + 16), "y_head": out + 16, "dtype": dtype}
    name = f"linear_heads-{rows}x{heads}x{width}x{out}-{'bf16' if dtype else 'f32'}"
    return Case(name, "linear_heads", scalars, {"x": x, "w": w}, {"y": expected})


def _spread(rng: np.random.Generator, shape: tuple[int, ...], room: tuple[int, ...], dtype: int) -> Array:
    """Random numbers of `shape` at the start of rows of `room`; NaN behind them."""
    x = np.full((shape[0], *room), np.nan, np.float32)
    x[..., : shape[-1]] = rng.standard_normal(shape, np.float32)
    return typed(x, dtype)
