"""RoPE, the latent's norm, and the new rows of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.gpu.cases import BF16, F32, Case, Output, f32, typed

EPS = 1e-6
CACHE = 3 * 64  # rows
TOLERANCE = {F32: (2e-6, 2e-6), BF16: (2e-6, 2.0**-7)}  # an ulp of bfloat16: its rounding may fall either way


@dataclass(frozen=True)
class Shape:
    """Sizes of a case; q_gap and kv_gap: elements between the rows of q and kv_new that must not be read."""

    rows: int
    heads: int
    nope: int
    rope: int
    lora: int
    q_gap: int = 0
    kv_gap: int = 0


SHAPES = (
    Shape(1, 4, 32, 16, 64),
    Shape(7, 2, 32, 16, 64, q_gap=3, kv_gap=80),
    Shape(3, 3, 5, 6, 37, q_gap=1, kv_gap=1),
    Shape(2, 1, 0, 2, 1),
    Shape(1, 8, 128, 64, 512, kv_gap=1536),
    Shape(16, 8, 128, 64, 512, kv_gap=1536),
    Shape(64, 16, 128, 64, 512),
    Shape(0, 8, 128, 64, 512),
)


def cases() -> Iterator[Case]:
    """The models' own sizes and odd ones, alone and side by side in wider rows; every third row is padding."""
    rng = np.random.default_rng(4)
    for dtype in (F32, BF16):
        for shape in SHAPES:
            yield _case(rng, shape, dtype)


def _case(rng: np.random.Generator, s: Shape, dtype: int) -> Case:
    heads = np.full((s.rows, s.heads, s.nope + s.rope), np.nan, np.float32)
    heads[..., s.nope :] = rng.standard_normal((s.rows, s.heads, s.rope))
    q = _gapped(heads.reshape(s.rows, s.heads * (s.nope + s.rope)), s.q_gap)
    kv_new = _gapped(rng.standard_normal((s.rows, s.lora + s.rope)) * 2, s.kv_gap)
    angles = rng.uniform(-np.pi, np.pi, (s.rows, s.rope // 2))
    kv_rows = rng.permutation(CACHE)[: s.rows].astype(np.int64)
    kv_rows[2::3] = -1
    inputs = {
        "q": typed(q, dtype),
        "kv_new": typed(kv_new, dtype),
        "weight": rng.standard_normal(s.lora).astype(np.float32),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "kv_rows": kv_rows,
    }
    atol, rtol = TOLERANCE[dtype]
    wants = {"absorbed": _absorbed(s, inputs), "kv": _cache(s, inputs)}
    outputs = {name: Output(typed(want, dtype), atol, rtol) for name, want in wants.items()}
    sizes = {"rows": s.rows, "heads": s.heads, "nope": s.nope, "rope": s.rope, "lora": s.lora}
    strides = {"q_stride": q.shape[1], "kv_stride": kv_new.shape[1]}
    name = f"mla_prep-{s.rows}x{s.heads}x{s.nope}+{s.rope}-{s.lora}-{'bf16' if dtype else 'f32'}"
    return Case(name, "mla_prep", {**sizes, **strides, "eps": EPS, "dtype": dtype}, inputs, outputs)


def _gapped(rows: np.ndarray, gap: int) -> np.ndarray:
    """Rows with `gap` times NaN behind each."""
    return np.concatenate([rows, np.full((len(rows), gap), np.nan)], axis=1).astype(np.float32)


def _absorbed(s: Shape, inputs: dict) -> np.ndarray:
    """NaN, as it was poisoned, but for the rope parts."""
    want = np.full((s.rows, s.heads, s.lora + s.rope), np.nan)
    q = f32(inputs["q"])[:, : s.heads * (s.nope + s.rope)].reshape(s.rows, s.heads, s.nope + s.rope)
    want[..., s.lora :] = _rotated(q[..., s.nope :], inputs["cos"][:, None], inputs["sin"][:, None])
    return want


def _cache(s: Shape, inputs: dict) -> np.ndarray:
    """NaN, as it was poisoned, but for the rows written."""
    want = np.full((CACHE, s.lora + s.rope), np.nan)
    new = f32(inputs["kv_new"]).astype(np.float64)
    latent, key = new[:, : s.lora], new[:, s.lora : s.lora + s.rope]
    normed = latent / np.sqrt((latent**2).mean(-1, keepdims=True) + EPS) * inputs["weight"]
    rows = np.concatenate([normed, _rotated(key, inputs["cos"], inputs["sin"])], axis=-1)
    real = inputs["kv_rows"] >= 0
    want[inputs["kv_rows"][real]] = rows[real]
    return want


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    low, high = np.split(x.astype(np.float64), 2, axis=-1)
    return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
