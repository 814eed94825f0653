"""MLA tree attention: trees, chains and single rows over a paged cache in which all that must not be read is NaN."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kdtp.types import PAGE_ROWS, depths
from tests.gpu.cases import BF16, F32, Array, Case, Output, f32, typed

STARTS = (0, 1, 63, 64, 65, 127, 500)
NAMES = {F32: "f32", BF16: "bf16"}


@dataclass(frozen=True)
class Shape:
    """What the model fixes."""

    heads: int
    lora: int
    rope: int
    dtype: int


@dataclass(frozen=True)
class Seq:
    """A sequence of the batch: committed rows, and the tree (or chain) of its own rows."""

    start: int
    parents: Sequence[int]


def one() -> list[int]:
    """A root alone."""
    return [-1]


def chain(count: int) -> list[int]:
    """A causal chain."""
    return list(range(-1, count - 1))


def star(count: int) -> list[int]:
    """A root and its children."""
    return [-1] + [0] * (count - 1)


def tree(rng: np.random.Generator, count: int) -> list[int]:
    """A random tree."""
    return [-1] + [int(rng.integers(0, i)) for i in range(1, count)]


def cases() -> Iterator[Case]:
    """Every dtype and kind of shape, every start, every tree; splits small and large; many rows; nothing at all."""
    rng = np.random.default_rng(3)
    for dtype in (F32, BF16):
        yield from _starts(rng, dtype)
        yield from _shapes(rng, dtype)
        yield from _batches(rng, dtype)
        empty = Shape(4, 64, 16, dtype)
        yield make(rng, "empty", empty, [], 64, padding=0)
        yield make(rng, "padding", empty, [], 64, padding=5)


def _starts(rng: np.random.Generator, dtype: int) -> Iterator[Case]:
    for i, start in enumerate(STARTS):
        split = (64, 128, 512)[i % 3]
        for name, parents in (("one", one()), ("chain", chain(9)), ("star", star(6)), ("tree", tree(rng, 16))):
            yield make(rng, f"{name}{start}", Shape(4, 64, 16, dtype), [Seq(start, parents)], split)
        for portable in (0, 1):
            name = f"k26-{'portable' if portable else 'tree'}{start}"
            yield make(rng, name, Shape(8, 512, 64, dtype), [Seq(start, tree(rng, 7))], split, portable=portable)


def _shapes(rng: np.random.Generator, dtype: int) -> Iterator[Case]:
    for heads in (1, 2, 3, 8, 12, 16, 33):
        yield make(rng, f"heads{heads}", Shape(heads, 64, 16, dtype), [Seq(130, tree(rng, 10))], 64)
    for heads in (1, 4, 16, 64):
        yield make(rng, f"k26-heads{heads}", Shape(heads, 512, 64, dtype), [Seq(200, tree(rng, 3))], 128)
    # Odd sizes, as the v3 golden model has them; no rope; an O wider than the threads.
    for heads, lora, rope in ((3, 40, 12), (1, 1, 0), (2, 17, 5), (5, 200, 64), (9, 700, 30)):
        yield make(rng, f"odd{heads}", Shape(heads, lora, rope, dtype), [Seq(70, tree(rng, 12)), Seq(3, one())], 64)


def _batches(rng: np.random.Generator, dtype: int) -> Iterator[Case]:
    tiny = Shape(4, 64, 16, dtype)
    ragged = [Seq(start, tree(rng, 1 + 5 * i % 11)) for i, start in enumerate(STARTS)]
    yield make(rng, "ragged", tiny, ragged, 128, padding=3, spare_start=700)
    yield make(rng, "ragged16", Shape(16, 64, 16, dtype), ragged, 64, padding=1)
    yield make(rng, "decode", tiny, [Seq(97 * i, one()) for i in range(13)], 256)
    yield make(rng, "long", tiny, [Seq(9000, tree(rng, 11)), Seq(2300, chain(5))], 512, padding=2)
    yield make(rng, "deep", tiny, [Seq(40, [-1, 0, 0, *range(2, 150)])], 64)
    yield make(rng, "prefill", tiny, [Seq(0, chain(300))], 64)
    yield make(rng, "prefill-later", tiny, [Seq(190, chain(131)), Seq(77, chain(150))], 256, padding=7)
    # Blocks of keys that end anywhere in either half, and more of them than the device does in two rounds.
    wide, kinds = Shape(8, 512, 64, dtype), (one(), chain(2), star(3), tree(rng, 7))
    tails = [Seq(start, kinds[i % 4]) for i, start in enumerate((0, 1, 14, 15, 16, 17, 29, 30, 31, 32, 46, 47, 62, 63))]
    for portable in (0, 1):
        yield make(rng, f"tails-portable{portable}", wide, tails, 64, padding=1, portable=portable)
    yield make(rng, "rounds", wide, [Seq(4100, tree(rng, 5)), *tails], 64, padding=2)
    forest = [Seq(int(rng.integers(0, 400)), tree(rng, int(rng.integers(1, 20)))) for _ in range(32)]
    yield make(rng, "forest", tiny, forest, 64, padding=9)


def make(
    rng: np.random.Generator,
    name: str,
    shape: Shape,
    seqs: Sequence[Seq],
    split: int,
    padding: int = 0,
    spare_start: int = 0,
    portable: int = 0,
) -> Case:
    """One call: pages in random order, padding rows behind the others, a max_start too large by spare_start."""
    width = shape.lora + shape.rope
    pages, lines, kv = _cache(rng, shape, seqs)
    index = tables(seqs, padding)
    rows = len(index["row_seq"])
    q = rng.standard_normal((rows, shape.heads, width))
    q[rows - padding :] = np.nan
    scale = 2.0 / width**0.5  # scores of deviation 2: some keys count much more than others, yet many count
    inputs = {"q": typed(q, shape.dtype), "kv": kv, "pages": pages, **index}
    scalars = {"rows": rows, "seqs": len(seqs), "heads": shape.heads, "lora": shape.lora, "rope": shape.rope}
    scalars |= {"max_depth": index["path"].shape[1], "max_pages": pages.shape[1], "split": split, "scale": scale}
    scalars |= {"portable": portable}
    scalars |= {"max_start": max((seq.start for seq in seqs), default=0) + spare_start, "dtype": shape.dtype}
    keys = [lines[b][_visible(seq, i)] for b, seq in enumerate(seqs) for i in range(len(seq.parents))]
    out = _expected(f32(inputs["q"]), f32(kv), keys, scale, shape)
    label = f"{shape.heads}x{shape.lora}+{shape.rope}-split{split}-{NAMES[shape.dtype]}"
    return Case(f"mla_tree-{name}-{label}", "mla_tree", scalars, inputs, {"out": out})


def _cache(rng: np.random.Generator, shape: Shape, seqs: Sequence[Seq]) -> tuple[np.ndarray, list[np.ndarray], Array]:
    """Page tables [B, P] i32, the cache row of each row of each sequence, and the cache, NaN where nothing is stored.

    Entries behind a table point to a page without content.
    """
    counts = [-(-(seq.start + len(seq.parents)) // PAGE_ROWS) for seq in seqs]
    order = rng.permutation(sum(counts) + 1)
    pages = np.full((len(seqs), max(counts, default=0) + 1), order[-1], np.int32)
    kv = np.full((len(order) * PAGE_ROWS, shape.lora + shape.rope), np.nan)
    lines = []
    for b, (seq, count) in enumerate(zip(seqs, counts, strict=True)):
        pages[b, :count] = order[sum(counts[:b]) :][:count]
        line = (pages[b, :count, None] * PAGE_ROWS + np.arange(PAGE_ROWS)).ravel()[: seq.start + len(seq.parents)]
        kv[line] = rng.standard_normal((len(line), kv.shape[1]))
        lines.append(line)
    return pages, lines, typed(kv, shape.dtype)


def tables(seqs: Sequence[Seq], padding: int) -> dict[str, np.ndarray]:
    """What says which row is which; what must not be read of it is -1."""
    paths = [ancestry(seq.parents, i) for seq in seqs for i in range(len(seq.parents))]
    path = np.full((len(paths) + padding, max(map(len, paths), default=0)), -1, np.int32)
    for row, nodes in zip(path, paths, strict=False):
        row[: len(nodes)] = nodes
    lengths = [len(seq.parents) for seq in seqs]
    depth = [d for seq in seqs for d in depths(seq.parents)]
    index = {
        "row_seq": np.repeat([*range(len(seqs)), -1], [*lengths, padding]),
        "row_depth": np.array([*depth, *[-1] * padding]),
        "path": path,
        "starts": np.array([seq.start for seq in seqs]),
        "first_row": np.cumsum([0, *lengths])[:-1],
    }
    return {name: array.astype(np.int32) for name, array in index.items()}


def ancestry(parents: Sequence[int], node: int) -> list[int]:
    """The node's ancestors from the root on, itself last."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def _visible(seq: Seq, node: int) -> list[int]:
    return [*range(seq.start), *(seq.start + i for i in ancestry(seq.parents, node))]


def _expected(q: np.ndarray, kv: np.ndarray, keys: Sequence[np.ndarray], scale: float, shape: Shape) -> Output:
    """In float64. bfloat16 weights are each off by up to 2^-8 of themselves, independently; 2.5 times the deviation of
    their sum at that much is beyond six sigma. The result itself may be rounded to the other neighbour."""
    out = np.zeros((len(q), shape.heads, shape.lora))
    variance = 0.0
    for row, seen in enumerate(keys):
        k = kv[seen].astype(np.float64)
        v = k[:, : shape.lora]
        scores = q[row].astype(np.float64) @ k.T * scale
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mean = out[row] = weights @ v
        square = weights**2
        moments = square @ v**2 - 2 * mean * (square @ v) + mean**2 * square.sum(-1, keepdims=True)
        variance = max(variance, float(moments.max()))
    if shape.dtype == F32:
        return Output(out.astype(np.float32), 1e-5, 1e-5)
    return Output(typed(out, BF16), 2.5 * 2.0**-8 * variance**0.5 + 1e-5, 2.0**-7)
