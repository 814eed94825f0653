"""The heads of a drafter before attention: norm, rotation, keys and values one behind the other. Every bit counts:
numpy rounds where the kernel does, and adds squares in its order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.gpu.cases import BF16, F32, Array, Case, Output, f32, typed

EPS = 1e-6
LANES = 32
# rows, heads, kv_heads, width
SHAPES = (
    (1, 2, 1, 32),
    (7, 4, 2, 64),
    (8, 8, 4, 32),
    (63, 3, 1, 128),
    (256, 2, 1, 128),
    (5, 3, 2, 2),
    (3, 2, 3, 10),
    (2, 5, 3, 66),
    (4, 1, 1, 256),
    (1, 1, 1, 254),
    (9, 0, 4, 32),
    (0, 8, 4, 32),
)


def cases() -> Iterator[Case]:
    """The shipped drafter's sizes, published ones' and odd ones; without queries; without rows; heads that are 0, or
    have NaN or infinity."""
    rng = np.random.default_rng(20)
    for dtype in (F32, BF16):
        for shape in SHAPES:
            yield _case("", rng, dtype, *shape)
        yield _case("nan-", rng, dtype, 4, 3, 2, 64)


def _case(kind: str, rng: np.random.Generator, dtype: int, rows: int, heads: int, kv_heads: int, width: int) -> Case:
    q = rng.standard_normal((rows, heads, width)) * 3
    kv = rng.standard_normal((rows, 2 * kv_heads, width))
    if kind:
        q[1, 1, 5], q[2, 0], kv[0, 1, width - 1], kv[3, 2] = np.nan, 0.0, np.inf, np.nan
    angles = rng.uniform(-np.pi, np.pi, (rows, width // 2))
    tables = {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    weights = {name: rng.standard_normal(width).astype(np.float32) for name in ("q_weight", "k_weight")}
    inputs: dict[str, Array] = {"kv": typed(kv, dtype), "k_weight": weights["k_weight"], **tables}
    keys, values = np.split(f32(inputs["kv"]), 2, axis=1)
    outputs = {"kv_out": _output(np.stack([_turned(keys, weights["k_weight"], tables, dtype), values]), dtype)}
    if heads:
        inputs |= {"q": typed(q, dtype), "q_weight": weights["q_weight"]}
        outputs["q_out"] = _output(_turned(f32(inputs["q"]), weights["q_weight"], tables, dtype), dtype)
    sizes = {"rows": rows, "heads": heads, "kv_heads": kv_heads, "width": width}
    name = f"gqa_prep-{kind}{rows}x{heads}+{kv_heads}x{width}-{'bf16' if dtype else 'f32'}"
    return Case(name, "gqa_prep", {**sizes, "eps": EPS, "dtype": dtype}, inputs, outputs)


def _output(x: np.ndarray, dtype: int) -> Output:
    return Output(typed(x, dtype))


def _turned(x: np.ndarray, weight: np.ndarray, tables: dict[str, np.ndarray], dtype: int) -> np.ndarray:
    """Before the last rounding. x float32 [rows, heads, width]."""
    with np.errstate(invalid="ignore", over="ignore"):
        root = np.sqrt(_squares(x) / np.float32(x.shape[2]) + np.float32(EPS))
        a, b = np.split(f32(typed(x / root * weight, dtype)), 2, axis=2)
        cos, sin = tables["cos"][:, None], tables["sin"][:, None]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=2)


def _squares(x: np.ndarray) -> np.ndarray:
    """Their sum: each lane's pairs first, then a butterfly over the lanes."""
    half = x.shape[2] // 2
    pairs = np.zeros((*x.shape[:2], 4 * LANES, 2), np.float32)
    pairs[:, :, :half] = np.stack([x[..., :half], x[..., half:]], axis=3)
    lanes = np.zeros((*x.shape[:2], LANES), np.float32)
    for i in range(4):
        for entry in range(2):
            lanes = lanes + pairs[:, :, LANES * i : LANES * (i + 1), entry] ** 2
    for offset in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[..., np.arange(LANES) ^ offset]
    return lanes[..., :1]
