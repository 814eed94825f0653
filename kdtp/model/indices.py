"""Index tensors of a batch for a GPU: planned on the host in one buffer, so that one copy takes all of them there."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch

from kdtp.model.cache import PagedCache
from kdtp.types import PAGE_ROWS, SeqRows, depths

T = TypeVar("T")


@dataclass(frozen=True)
class Shape:
    """How large the index tensors are: of one batch, or large enough for many, with padding behind what a batch has.

    rows M, seqs B, picked R; depth: width of `path`; pages: width of the page tables; max_start: no start is above it.
    """

    rows: int
    seqs: int
    depth: int
    pages: int
    picked: int
    max_start: int
    padded: bool = True

    @property
    def size(self) -> int:
        """Entries of the buffer."""
        per_row, per_seq = 2 + 2 + 3 + self.depth, 2 + self.pages  # an int64 is two entries
        return self.rows * per_row + self.seqs * per_seq + self.picked


class Indices(NamedTuple, Generic[T]):
    """tokens, kv_rows (-1: padding) int64 [M], the rest int32: positions, row_seq (-1: padding), row_depth [M],
    path [M, depth], starts, first_row [B], pages [B, pages] as in csrc/params.h (mla_tree), picked [R].
    """

    tokens: T
    kv_rows: T
    positions: T
    row_seq: T
    row_depth: T
    path: T
    starts: T
    first_row: T
    pages: T
    picked: T


def views(buffer: torch.Tensor, shape: Shape) -> Indices[torch.Tensor]:
    """The index tensors in a buffer, int32 [shape.size]."""
    return _views(buffer, torch.int64, shape)


def _views(buffer: Any, int64: Any, shape: Shape) -> Indices[Any]:
    m, b = shape.rows, shape.seqs
    longs, ints = buffer[: 4 * m].view(int64), buffer[4 * m :]  # first, where they are aligned
    sizes = (m, m, m, m * shape.depth, b, b, b * shape.pages, shape.picked)
    parts = [ints[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    positions, row_seq, row_depth, path, starts, first_row, pages, picked = parts
    path, pages = path.reshape(m, shape.depth), pages.reshape(b, shape.pages)
    return Indices(longs[:m], longs[m:], positions, row_seq, row_depth, path, starts, first_row, pages, picked)


def padding(shape: Shape) -> torch.Tensor:
    """A buffer on the host whose rows are all padding."""
    return _host(shape, pinned=False)[0]


def _host(shape: Shape, pinned: bool) -> tuple[torch.Tensor, Indices[Any]]:
    """Padding, and its index tensors as numpy arrays: an assignment costs a fraction of torch's."""
    buffer = torch.zeros(shape.size, dtype=torch.int32, pin_memory=pinned)
    made = _views(buffer.numpy(), np.int64, shape)
    made.kv_rows[:] = -1
    made.row_seq[:] = -1
    return buffer, made


def exact(seqs: Sequence[SeqRows]) -> Shape:
    """The shape of this very batch."""
    # The kernel reads no path of a chain's rows.
    deepest = [max(depth) + 1 for depth in (depths(seq.parents) for seq in seqs) if not _is_chain(depth)]
    return Shape(
        rows=sum(len(seq.tokens) for seq in seqs),
        seqs=len(seqs),
        depth=max(deepest, default=0),
        pages=max(_pages(seq) for seq in seqs),
        picked=sum(seq.pick for seq in seqs),
        max_start=max(seq.start for seq in seqs),
        padded=False,
    )


def plan_device(seqs: Sequence[SeqRows], cache: PagedCache, shape: Shape) -> torch.Tensor:
    """The buffer of a batch that fits into `shape`, on the host; pinned if the cache is on a GPU.

    The sequences' pages are in the cache's tables. RuntimeError for rows beyond a page table.
    """
    buffer, made = _host(shape, pinned=cache.kv.is_cuda)
    first = picked = 0
    for b, seq in enumerate(seqs):
        last = first + len(seq.tokens)
        _fill(made, b, slice(first, last), seq, cache)
        made.picked[picked : picked + seq.pick] = range(last - seq.pick, last)
        first, picked = last, picked + seq.pick
    return buffer


def _fill(made: Indices[Any], b: int, rows: slice, seq: SeqRows, cache: PagedCache) -> None:
    depth = depths(seq.parents)
    made.tokens[rows] = seq.tokens
    line = cache.line(seq.seq, seq.start + len(depth)).numpy()
    made.kv_rows[rows] = line[seq.start :]
    made.row_seq[rows] = b
    made.row_depth[rows] = depth
    made.positions[rows] = made.row_depth[rows] + seq.start
    made.starts[b] = seq.start
    made.first_row[b] = rows.start
    made.pages[b, : _pages(seq)] = line[::PAGE_ROWS] // PAGE_ROWS
    if not _is_chain(depth):
        path = made.path[rows]
        for i, (parent, d) in enumerate(zip(seq.parents, depth, strict=True)):
            path[i, :d] = path[parent, :d]
            path[i, d] = i


def _is_chain(depth: Sequence[int]) -> bool:
    return depth[-1] == len(depth) - 1


def _pages(seq: SeqRows) -> int:
    return -(-(seq.start + len(seq.tokens)) // PAGE_ROWS)
