"""One ragged batch as tensors, made once per forward and shared by all layers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kdtp import kernels
from kdtp.kernels import Keys
from kdtp.kernels.cuda import Tables
from kdtp.model.cache import PagedCache
from kdtp.types import PAGE_ROWS, SeqRows, depths


@dataclass(frozen=True)
class Batch:
    """The M rows of all sequences, one sequence after the other, and padding behind them: M' rows, whole tiles.

    tokens int64 [M']; cos, sin float32 [M', 1, rope]: of each row's position; rows int64 [M]: the cache row its KV is
    written to; keys: what each of the M rows sees; picked int64 [R]: rows whose logits are wanted.
    """

    tokens: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor
    keys: list[Keys] | Tables
    picked: torch.Tensor


def plan_host(seqs: Sequence[SeqRows], cache: PagedCache, cos: torch.Tensor, sin: torch.Tensor) -> Batch:
    """The batch of `seqs` for a CPU; their pages are in the cache's tables; cos, sin as rope.tables makes them.

    RuntimeError for rows beyond a page table, and for a sequence that comes twice.
    """
    _check_distinct(seqs)
    lines = [cache.line(seq.seq, seq.start + len(seq.tokens)) for seq in seqs]
    tokens = [token for seq in seqs for token in seq.tokens]
    positions = [seq.start + depth for seq in seqs for depth in depths(seq.parents)]
    padding = [0] * (-len(tokens) % kernels.TILE)
    where = torch.tensor(positions + padding)
    return Batch(
        tokens=torch.tensor(tokens + padding),
        cos=cos[where],
        sin=sin[where],
        rows=torch.cat([line[seq.start :] for line, seq in zip(lines, seqs, strict=True)]),
        keys=kernels.plan_keys(lines, [seq.parents for seq in seqs]),
        picked=torch.tensor(_picked(seqs), dtype=torch.int64),
    )


def plan_device(seqs: Sequence[SeqRows], cache: PagedCache, cos: torch.Tensor, sin: torch.Tensor) -> Batch:
    """The batch of `seqs` for a GPU: as plan_host, but without padding, and with page tables for keys."""
    _check_distinct(seqs)
    device = cos.device
    ints = _Ints(device)
    depth = [depths(seq.parents) for seq in seqs]
    lines = [cache.line(seq.seq, seq.start + len(seq.tokens)) for seq in seqs]
    positions = ints.long([seq.start + d for seq, each in zip(seqs, depth, strict=True) for d in each])
    widest = max(max(each) for each in depth) + 1
    pages = [cache.table(seq.seq)[: -(-len(line) // PAGE_ROWS)] for seq, line in zip(seqs, lines, strict=True)]
    most = max(map(len, pages))
    ends = list(itertools.accumulate(len(seq.tokens) for seq in seqs))
    tables = Tables(
        row_seq=ints.int([b for b, seq in enumerate(seqs) for _ in seq.tokens]),
        row_depth=ints.int([d for each in depth for d in each]),
        path=ints.int([path for seq in seqs for path in _paths(seq.parents, widest)]),
        starts=ints.int([seq.start for seq in seqs]),
        first_row=ints.int([end - len(seq.tokens) for end, seq in zip(ends, seqs, strict=True)]),
        pages=ints.int([table + [0] * (most - len(table)) for table in pages]),
        max_start=max(seq.start for seq in seqs),
    )
    rows = torch.cat([line[seq.start :] for line, seq in zip(lines, seqs, strict=True)])
    return Batch(
        tokens=ints.long([token for seq in seqs for token in seq.tokens]),
        cos=cos[positions],
        sin=sin[positions],
        rows=rows.to(device),
        keys=tables,
        picked=ints.long(_picked(seqs)),
    )


@dataclass(frozen=True)
class _Ints:
    """Index tensors on one device."""

    device: torch.device

    def int(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32).to(self.device)

    def long(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device)


def _paths(parents: Sequence[int], width: int) -> list[list[int]]:
    """Each row's ancestors by depth, itself last, filled up with itself."""
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append([*(paths[parent] if i else []), i])
    return [path + path[-1:] * (width - len(path)) for path in paths]


def _check_distinct(seqs: Sequence[SeqRows]) -> None:
    if len({seq.seq for seq in seqs}) != len(seqs):
        raise RuntimeError(f"a batch with a sequence twice: {[seq.seq for seq in seqs]}")


def _picked(seqs: Sequence[SeqRows]) -> list[int]:
    picked: list[int] = []
    end = 0
    for seq in seqs:
        end += len(seq.tokens)
        picked += range(end - seq.pick, end)
    return picked
