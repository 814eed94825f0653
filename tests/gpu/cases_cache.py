"""Moves of cache rows, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tests.gpu.cases import BF16, F32, Case, Output, typed

Move = tuple[np.ndarray, np.ndarray]  # sources and targets of one group


def cases() -> Iterator[Case]:
    """Commits of trees as the engine makes them, every kind of overlap, many groups, the largest group, none."""
    rng = np.random.default_rng(5)
    for dtype in (F32, BF16):
        yield _case(rng, "commit", 61, 128, 576, [_commit(rng, 70, 16, 6)], dtype)
        yield _case(rng, "commits", 4, 640, 576, [_commit(rng, 64 * i + 3, 33, 4 + 5 * i) for i in range(6)], dtype)
        many = [_commit(rng, 64 * i + 3, 33, int(rng.integers(0, 34))) for i in range(64)]
        yield _case(rng, "commits-of-64", 3, 64 * 64, 576, many, dtype)
        yield _case(rng, "shift-down", 3, 100, 80, [_shift(11, 10, 80)], dtype)
        yield _case(rng, "shift-up", 3, 100, 80, [_shift(10, 11, 80)], dtype)
        yield _case(rng, "permutation", 2, 300, 66, [_permutation(rng, 0, 90), _permutation(rng, 100, 177)], dtype)
        yield _case(rng, "in-place", 2, 40, 8, [_shift(5, 5, 10)], dtype)
        yield _case(rng, "largest", 2, 2100, 72, [_permutation(rng, 50, 1025)], dtype)
        yield _case(rng, "empty-groups", 2, 64, 32, [_shift(0, 0, 0), _shift(9, 3, 8), _shift(0, 0, 0)], dtype)
        yield _case(rng, "narrow", 3, 50, 2, [_permutation(rng, 1, 40)], dtype)
        yield _case(rng, "no-groups", 2, 64, 32, [], dtype)
        yield _case(rng, "no-layers", 0, 64, 32, [_shift(9, 3, 8)], dtype)


def _commit(rng: np.random.Generator, start: int, nodes: int, kept: int) -> Move:
    """Accepted nodes of a tree, rising, to the rows behind the root."""
    return start + 1 + np.sort(rng.permutation(nodes)[:kept]), start + 1 + np.arange(kept)


def _shift(source: int, target: int, count: int) -> Move:
    return source + np.arange(count), target + np.arange(count)


def _permutation(rng: np.random.Generator, start: int, count: int) -> Move:
    return start + rng.permutation(count), start + rng.permutation(count)


def _case(
    rng: np.random.Generator, kind: str, layers: int, layer_rows: int, width: int, groups: Sequence[Move], dtype: int
) -> Case:
    before = rng.standard_normal((layers, layer_rows, width))
    after = before.copy()
    for sources, targets in groups:
        after[:, targets] = before[:, sources]
    sources, targets = (np.concatenate([np.zeros(0), *(g[i] for g in groups)]).astype(np.int64) for i in (0, 1))
    offsets = np.cumsum([0, *(len(g[0]) for g in groups)]).astype(np.int32)
    scalars = {"layers": layers, "layer_rows": layer_rows, "width": width, "groups": len(groups), "dtype": dtype}
    inputs = {"source": sources, "target": targets, "offsets": offsets}
    name = f"kv_move-{kind}-{'bf16' if dtype else 'f32'}"
    return Case(name, "kv_move", scalars, inputs, {"kv": Output(typed(after, dtype), initial=typed(before, dtype))})
