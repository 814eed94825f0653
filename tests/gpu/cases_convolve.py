"""The convolution of a drafter. Every bit counts: numpy rounds where the kernel does, and adds in its order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from tests.gpu.cases import BF16, F32, Case, Output, f32, typed


@dataclass(frozen=True)
class Shape:
    """Sizes of a case: `blocks` of n rows."""

    blocks: int
    n: int
    width: int
    taps: int
    groups: int


SHIPPED = Shape(1, 8, 256, 2, 16)
SHAPES = (
    SHIPPED,
    replace(SHIPPED, blocks=32),  # 256 rows
    Shape(1, 1, 8, 1, 1),
    Shape(1, 7, 40, 4, 5),
    Shape(9, 7, 33, 3, 11),  # 63 rows that are not whole 16 bytes
    Shape(2, 4, 24, 9, 24),  # more taps than slots; a group for each channel
    Shape(1, 16, 7168, 2, 448),
    Shape(3, 5, 1001, 3, 7),
    Shape(0, 8, 256, 2, 16),
)


def cases() -> Iterator[Case]:
    """The shipped drafter's sizes and odd ones, on either side; NaN and infinity in x, dynamic and base."""
    rng = np.random.default_rng(21)
    for dtype in (F32, BF16):
        for i, shape in enumerate(SHAPES):
            yield _case("", rng, shape, i % 2, dtype)
        for side in (0, 1):
            yield _case("nan-", rng, Shape(3, 4, 48, 3, 6), side, dtype)


def _case(kind: str, rng: np.random.Generator, s: Shape, side: int, dtype: int) -> Case:
    rows = s.blocks * s.n
    x = rng.standard_normal((rows, s.width))
    dynamic = rng.standard_normal((rows, 2, s.taps, s.groups)) / 2
    base = rng.standard_normal((2, s.taps, s.width)) / 2
    x[rows // 2 :, ::5] = -0.0
    if kind:
        x[5, 17], x[1, 3] = np.nan, -np.inf
        dynamic[4, :, 2, 1], dynamic[9, 1 - side] = np.inf, np.nan  # a tap before the block; the other side
    inputs = {"x": typed(x, dtype), "dynamic": typed(dynamic, dtype), "base": typed(base, dtype)}
    want = _convolved(*(f32(array) for array in inputs.values()), s, side, dtype)
    sizes = {"rows": rows, "width": s.width, "taps": s.taps, "groups": s.groups, "side": side, "n": s.n}
    name = f"convolve-{kind}{s.blocks}x{s.n}x{s.width}-{s.taps}x{s.groups}-{side}-{'bf16' if dtype else 'f32'}"
    return Case(name, "convolve", {**sizes, "dtype": dtype}, inputs, {"out": Output(typed(want, dtype))})


def _convolved(x: np.ndarray, dynamic: np.ndarray, base: np.ndarray, s: Shape, side: int, dtype: int) -> np.ndarray:
    """Before the last rounding."""
    spread = np.repeat(dynamic[:, side], s.width // s.groups, axis=2)
    total, blocks = np.zeros_like(x), x.reshape(s.blocks, s.n, s.width)
    with np.errstate(invalid="ignore"):
        for tap in range(s.taps):
            shifted = np.zeros_like(blocks)
            shifted[:, tap:] = blocks[:, : max(0, s.n - tap)]
            factors = f32(typed(base[side, tap] + spread[:, tap], dtype))
            total = total + f32(typed(shifted.reshape(x.shape) * factors, dtype))
    return total
