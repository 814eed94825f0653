"""Rows of a vocabulary shard."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tests.gpu.cases import BF16, F32, Case, Output, f32, typed

FAR = 2**62


def cases() -> Iterator[Case]:
    """Shards from the start and from the middle of a vocabulary, ids on and beyond their edges, an empty shard."""
    rng = np.random.default_rng(3)
    for dtype in (F32, BF16):
        for rows, vocab, width, first in (
            (1, 1, 1, 0), (3, 7, 31, 5), (20, 64, 256, 0), (5, 64, 256, 448), (64, 100, 7168, 20480), (9, 40, 12, 40),
            (4, 0, 8, 16), (0, 16, 8, 0),
        ):  # fmt: skip
            yield _case(rng, rows, vocab, width, first, dtype)


def _case(rng: np.random.Generator, rows: int, vocab: int, width: int, first: int, dtype: int) -> Case:
    edges = np.array([first, first + vocab - 1, first - 1, first + vocab, 0, -1, FAR, -FAR])
    ids = np.concatenate([edges, rng.integers(first - 2, first + vocab + 2, max(rows - len(edges), 0))])
    ids = rng.permutation(ids)[:rows].astype(np.int64)
    weight = rng.standard_normal((vocab, width)).astype(np.float32)
    here = (ids >= first) & (ids < first + vocab)
    unused = np.setdiff1d(np.arange(vocab), ids[here] - first)
    weight[unused] = np.nan
    stored = typed(weight, dtype)
    want = np.zeros((rows, width), np.float32)
    want[here] = f32(stored)[ids[here] - first]
    scalars = {"rows": rows, "vocab": vocab, "width": width, "first": first, "dtype": dtype}
    name = f"embedding-{rows}of{vocab}x{width}-from{first}-{'bf16' if dtype else 'f32'}"
    return Case(name, "embedding", scalars, {"ids": ids, "weight": stored}, {"out": Output(typed(want, dtype))})
