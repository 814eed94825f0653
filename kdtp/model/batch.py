"""One ragged batch as tensors, made once per forward and shared by all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kdtp import kernels
from kdtp.kernels import Keys
from kdtp.model.cache import PagedCache
from kdtp.types import SeqRows, depths


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
    keys: list[Keys]
    picked: torch.Tensor


def plan(seqs: Sequence[SeqRows], cache: PagedCache, cos: torch.Tensor, sin: torch.Tensor) -> Batch:
    """The batch of `seqs`, whose pages are in the cache's tables; cos, sin as rope.tables makes them.

    RuntimeError for rows beyond a page table, and for a sequence that comes twice.
    """
    if len({seq.seq for seq in seqs}) != len(seqs):
        raise RuntimeError(f"a batch with a sequence twice: {[seq.seq for seq in seqs]}")
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


def _picked(seqs: Sequence[SeqRows]) -> list[int]:
    picked: list[int] = []
    end = 0
    for seq in seqs:
        end += len(seq.tokens)
        picked += range(end - seq.pick, end)
    return picked
