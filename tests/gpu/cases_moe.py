"""moe and moe_repack: plain, bfloat16 and INT4 experts; one row, padding, many rows of one expert, a rank of K2.6."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kdtp.model.weights.kdtr import Bf16
from tests.gpu.cases import BF16, F32, Array, Case, Output, bf16, f32, typed

DENSE, INT4 = 0, 1

# rows, hidden, inter, experts, topk. The first: sizes that only the plain form takes.
ODD = ((0, 8, 4, 2, 1), (1, 33, 7, 3, 2), (9, 70, 13, 4, 3), (40, 19, 5, 2, 2), (3, 260, 300, 1, 1))
MODELS = ((1, 256, 64, 8, 2), (7, 256, 32, 8, 2), (64, 192, 96, 16, 4), (150, 64, 32, 4, 2), (3, 7168, 256, 2, 1))
PACKED = (
    (0, 64, 64, 2, 1),
    (1, 64, 64, 1, 1),
    (5, 128, 64, 3, 2),
    (8, 576, 192, 12, 4),
    (70, 320, 128, 6, 3),
    (300, 256, 64, 5, 2),
    (1, 7168, 256, 10, 8),
    (12, 7168, 256, 3, 2),
)
REPACKED = ((1, 16, 64), (3, 48, 192), (2, 512, 7168), (5, 320, 64))  # experts, out, in


def cases() -> Iterator[Case]:
    """Routing is random, with padding in one row of seven; the weights of padding are NaN."""
    rng = np.random.default_rng(3)
    for shape in ODD + MODELS:
        for dtype in (F32, BF16):
            yield _case(rng, *shape, dtype, DENSE)
    for shape in PACKED:
        yield _case(rng, *shape, BF16, INT4)
    for experts, out, width in REPACKED:
        yield _repack_case(rng, experts, out, width)


def quantised(rng: np.random.Generator, experts: int, out: int, width: int) -> tuple[np.ndarray, Bf16, np.ndarray]:
    """Random INT4 weights as published: packed int32 [E, out, in / 8], scales [E, out, in / 32]; and their values."""
    q = rng.integers(-8, 8, (experts, out, width), np.int8)
    scales = bf16(rng.uniform(0.1, 0.4, (experts, out, width // 32)).astype(np.float32) / np.sqrt(width))
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    words = ((q + 8).astype(np.uint32).reshape(experts, out, -1, 8) << shifts).sum(-1, dtype=np.uint32)
    return words.view(np.int32), scales, q * np.repeat(f32(scales), 32, -1)


def repacked(words: np.ndarray, scales: Bf16) -> tuple[np.ndarray, Bf16]:
    """What moe_repack makes of them, said once more by axes (csrc/kernels/moe_repack.cuh has it in words).

    A nibble of a word, from the lowest: which of two inputs (slowest), which pair of inputs, which output.
    """
    experts, out, width = words.shape[0], words.shape[1], words.shape[2] * 8
    nibbles = (words.view(np.uint32)[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    #                      E,       tile,      upper, g, step,       block, t, mma, pair, half
    axes = nibbles.reshape(experts, out // 16, 2, 8, width // 64, 2, 4, 2, 2, 2)
    #                      E, tile, step, g, t, block, mma, half, pair, upper
    order = axes.transpose(0, 1, 4, 3, 6, 5, 7, 9, 8, 2).reshape(-1, 8)
    made = (order << np.arange(0, 32, 4, dtype=np.uint32)).sum(-1, dtype=np.uint32)
    grid = scales.bits.reshape(experts, out // 16, 2, 8, width // 64, 2)  # E, tile, upper, g, step, block
    return made.view(np.int32), Bf16(np.ascontiguousarray(grid.transpose(0, 1, 4, 3, 5, 2)).reshape(-1))


def _repack_case(rng: np.random.Generator, experts: int, out: int, width: int) -> Case:
    words, scales, _ = quantised(rng, experts, out, width)
    packed_out, scales_out = repacked(words, scales)
    scalars = {"experts": experts, "out": out, "in": width}
    outputs = {"packed_out": Output(packed_out), "scales_out": Output(scales_out)}
    return Case(
        f"moe_repack-{experts}x{out}x{width}", "moe_repack", scalars, {"packed": words, "scales": scales}, outputs
    )


def _case(
    rng: np.random.Generator, rows: int, hidden: int, inter: int, experts: int, topk: int, dtype: int, format: int
) -> Case:
    x = typed(rng.standard_normal((rows, hidden), np.float32), dtype)
    ids = np.array([rng.permutation(experts)[:topk] for _ in range(rows)], np.int32).reshape(rows, topk)
    weights = rng.uniform(0.1, 1.0, (rows, topk)).astype(np.float32)
    padding = np.arange(rows) % 7 == 5
    ids[padding], weights[padding] = -1, np.nan
    inputs: dict[str, Array] = {"x": x, "ids": ids, "weights": weights}
    if format == INT4:
        matrices = {}
        for name, shape in (("gate_up", (experts, 2 * inter, hidden)), ("down", (experts, hidden, inter))):
            words, scales, matrices[name] = quantised(rng, *shape)
            inputs[f"w_{name}"], inputs[f"s_{name}"] = repacked(words, scales)
    else:
        inputs["w_gate_up"] = typed(_normal(rng, experts, 2 * inter, hidden), dtype)
        inputs["w_down"] = typed(_normal(rng, experts, hidden, inter), dtype)
        matrices = {"gate_up": f32(inputs["w_gate_up"]), "down": f32(inputs["w_down"])}
    want = _experts(f32(x), ids, weights, matrices["gate_up"], matrices["down"], dtype)
    if rows % 2:
        inputs["add"] = typed(rng.standard_normal((rows, hidden), np.float32), dtype)
        want += f32(inputs["add"])
    scale = float(np.sqrt((want**2).mean())) if want.size else 1.0
    # bfloat16: the result and each `inner` near a border may be rounded the other way.
    atol, rtol = (scale * 2.0**-9, 2.0**-7) if dtype == BF16 else (scale * 1e-5, 1e-5)
    kind = "int4" if format == INT4 else "bf16" if dtype == BF16 else "f32"
    scalars = {"rows": rows, "hidden": hidden, "inter": inter, "experts": experts, "topk": topk}
    scalars |= {"format": format, "dtype": dtype}
    name = f"moe-{rows}x{hidden}x{inter}-{topk}of{experts}-{kind}"
    return Case(name, "moe", scalars, inputs, {"out": Output(typed(want.astype(np.float32), dtype), atol, rtol)})


def _normal(rng: np.random.Generator, experts: int, out: int, width: int) -> np.ndarray:
    made: np.ndarray = rng.standard_normal((experts, out, width), np.float32) / np.sqrt(width, dtype=np.float32)
    return made


def _experts(
    x: np.ndarray, ids: np.ndarray, weights: np.ndarray, w_gate_up: np.ndarray, w_down: np.ndarray, dtype: int
) -> np.ndarray:
    """The weighted sum in float64; silu(gate) * up is rounded to the element type on the way, as the kernels do."""
    out = np.zeros(x.shape)
    for expert in np.unique(ids[ids >= 0]):
        at, choice = np.nonzero(ids == expert)
        gate, up = np.split(x[at].astype(np.float64) @ w_gate_up[expert].astype(np.float64).T, 2, 1)
        inner = f32(typed((gate / (1 + np.exp(-gate)) * up).astype(np.float32), dtype))
        out[at] += weights[at, choice, None] * (inner.astype(np.float64) @ w_down[expert].astype(np.float64).T)
    return out
