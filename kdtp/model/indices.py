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
    return Shape(
        rows=sum(len(seq.tokens) for seq in seqs),
        seqs=len(seqs),
        depth=path_rows(seqs),
        pages=max(_pages(seq) for seq in seqs),
        picked=sum(seq.pick for seq in seqs),
        max_start=max(seq.start for seq in seqs),
        padded=False,
    )


def path_rows(seqs: Sequence[SeqRows]) -> int:
    """Of the longest path of a tree, its root's too; the kernel reads no path of a chain's rows."""
    return max((max(depth) + 1 for depth in (depths(seq.parents) for seq in seqs) if not _is_chain(depth)), default=0)


def plan_device(seqs: Sequence[SeqRows], cache: PagedCache, shape: Shape) -> torch.Tensor:
    """The buffer of a batch that fits into `shape`, on the host; pinned if the cache is on a GPU.

    The sequences' pages are in the cache's tables. RuntimeError for rows beyond a page table.
    """
    buffer, made = _host(shape, pinned=cache.kv.is_cuda)
    # Lists of all sequences' rows: an assignment to an array costs about the same for all as for one.
    tokens: list[int] = []
    positions: list[int] = []
    row_seq: list[int] = []
    row_depth: list[int] = []
    picked: list[int] = []
    lines = []
    for b, seq in enumerate(seqs):
        first, size = len(tokens), len(seq.tokens)
        depth, start = depths(seq.parents), seq.start
        line = cache.array(seq.seq, start + size)
        lines.append(line[start:])
        made.pages[b, : _pages(seq)] = line[::PAGE_ROWS]
        made.starts[b], made.first_row[b] = start, first
        tokens += seq.tokens
        positions += [start + d for d in depth]
        row_seq += [b] * size
        row_depth += depth
        picked += range(first + size - seq.pick, first + size)
        if not _is_chain(depth):
            path = made.path[first : first + size]
            for i, (parent, d) in enumerate(zip(seq.parents, depth, strict=True)):
                path[i, :d] = path[parent, :d]
                path[i, d] = i
    rows = len(tokens)
    made.tokens[:rows], made.positions[:rows] = tokens, positions
    made.kv_rows[:rows] = np.concatenate(lines)
    made.row_seq[:rows], made.row_depth[:rows] = row_seq, row_depth
    made.pages[: len(seqs)] //= PAGE_ROWS  # of rows until here
    made.picked[: len(picked)] = picked
    return buffer


def _is_chain(depth: Sequence[int]) -> bool:
    return depth[-1] == len(depth) - 1


def _pages(seq: SeqRows) -> int:
    return -(-(seq.start + len(seq.tokens)) // PAGE_ROWS)
