"""One ragged batch as tensors, made once per forward and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kdtp import kernels
from kdtp.kernels import Keys
from kdtp.kernels.cuda import Tables
from kdtp.model.cache import PagedCache
from kdtp.model.indices import Shape, views
from kdtp.types import TILE, SeqRows, depths


@dataclass(frozen=True)
class Batch:
    """The M rows of all sequences, one sequence after the other, and padding behind them: M' rows.

    tokens int64 [M']; cos, sin: of each row's position, as kernels.mla_prep takes them; rows int64: the cache row its
    KV is written to; keys: what each row sees; picked [R]: rows whose logits are wanted. On a CPU M' is whole tiles,
    and rows and keys are those of the M. On a GPU they are of all M', rows -1 for padding; `padded`:
    whether there is any.
    """

    tokens: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor
    keys: list[Keys] | Tables
    picked: torch.Tensor
    padded: bool = False


def plan_host(seqs: Sequence[SeqRows], cache: PagedCache, cos: torch.Tensor, sin: torch.Tensor) -> Batch:
    """The batch of `seqs` for a CPU; their pages are in the cache's tables; cos, sin as rope.tables makes them.

    RuntimeError for rows beyond a page table.
    """
    lines = [cache.line(seq.seq, seq.start + len(seq.tokens)) for seq in seqs]
    tokens = [token for seq in seqs for token in seq.tokens]
    positions = [seq.start + depth for seq in seqs for depth in depths(seq.parents)]
    padding = [0] * (-len(tokens) % TILE)
    where = torch.tensor(positions + padding)
    return Batch(
        tokens=torch.tensor(tokens + padding),
        cos=cos[where],
        sin=sin[where],
        rows=torch.cat([line[seq.start :] for line, seq in zip(lines, seqs, strict=True)]),
        keys=kernels.plan_keys(lines, [seq.parents for seq in seqs]),
        picked=torch.tensor(_picked(seqs), dtype=torch.int64),
    )


def place(buffer: torch.Tensor, shape: Shape, cos: torch.Tensor, sin: torch.Tensor) -> Batch:
    """The batch for a GPU, from its indices there, int32 [shape.size] as plan_device makes them; cos, sin as above."""
    made = views(buffer, shape)
    return Batch(
        tokens=made.tokens,
        cos=cos.index_select(0, made.positions),
        sin=sin.index_select(0, made.positions),
        rows=made.kv_rows,
        keys=Tables(made.row_seq, made.row_depth, made.path, made.starts, made.first_row, made.pages, shape.max_start),
        picked=made.picked,
        padded=shape.padded,
    )


def _picked(seqs: Sequence[SeqRows]) -> list[int]:
    picked: list[int] = []
    end = 0
    for seq in seqs:
        end += len(seq.tokens)
        picked += range(end - seq.pick, end)
    return picked
