"""Paged latent KV rows of one rank, and which page belongs to which sequence."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from kdtp import kernels
from kdtp.config import ModelConfig
from kdtp.types import PAGE_ROWS, Move, page_rows

Rows: TypeAlias = NDArray[np.int64]


class PagedCache:
    """kv [layers, pages * 64, kv_row]; a sequence's row i lies in page i // 64 of its append-only table.

    Latent rows are the same on every rank, so one page map, the coordinator's, is true for all; it is checked here.
    Several sequences may hold a page whose rows were all committed before they began; nobody writes to it then.
    RuntimeError for a page that does not exist or is another's, a row beyond the table, an unknown sequence.
    poison: rows without content are NaN, so that reading one shows. Tables stay on the host.
    """

    def __init__(
        self,
        config: ModelConfig,
        pages: int,
        dtype: torch.dtype,
        poison: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.pages = pages
        self.kv = torch.zeros(config.num_hidden_layers, pages * PAGE_ROWS, config.kv_row, dtype=dtype, device=device)
        self._poison = poison
        self._holders: dict[int, list[int]] = {}  # of each page, the sequences whose tables have it
        self._shared: dict[int, int] = {}  # per sequence, rows that it found committed when it began
        self._tables: dict[int, list[int]] = {}  # per sequence, its pages,
        self._lines: dict[int, Rows] = {}  # and the cache row of each of its rows
        if poison:
            self.kv.fill_(torch.nan)

    def append(self, seq: int, pages: Sequence[int], start: int = 0) -> None:
        """Append pages to the table of `seq`, which the first call opens; start: its rows that are committed now."""
        known = seq in self._tables
        if known and start < self._shared[seq]:
            raise RuntimeError(f"sequence {seq}: row {start} is shared, as are all before {self._shared[seq]}")
        if known and not pages:
            return
        shared = 0 if known else start // PAGE_ROWS
        for i, page in enumerate(pages):
            if not 0 <= page < self.pages:
                raise RuntimeError(f"sequence {seq}: page {page} is not one of 0..{self.pages - 1}")
            holders = [seq] if page in pages[:i] else self._holders.get(page, [])
            if holders and (i >= shared or seq in holders):
                raise RuntimeError(f"sequence {seq}: page {page} already belongs to sequence {holders[0]}")
        for page in pages:
            self._holders.setdefault(page, []).append(seq)
        new = [np.arange(page * PAGE_ROWS, (page + 1) * PAGE_ROWS) for page in pages]
        if self._poison and new[shared:]:
            self._spoil(np.concatenate(new[shared:]))
        self._shared.setdefault(seq, start)
        self._tables.setdefault(seq, []).extend(pages)
        self._lines[seq] = np.concatenate([self._lines.get(seq, np.empty(0, np.int64)), *new])

    def line(self, seq: int, count: int) -> torch.Tensor:
        """The cache row of each of the first `count` rows of `seq`, int64 [count]."""
        return torch.from_numpy(self.array(seq, count))

    def array(self, seq: int, count: int) -> Rows:
        """As `line`, as an array: at less than half the time."""
        self._check(seq, count)
        return self._lines[seq][:count]

    def places(self, seq: int, start: int, count: int) -> list[int]:
        """The cache row of each of `count` rows of `seq`, from row `start` on: for few rows, sooner than `line`."""
        self._check(seq, start + count)
        return page_rows(self._tables[seq], start, count)

    def _check(self, seq: int, count: int) -> None:
        if seq not in self._tables:
            raise RuntimeError(f"sequence {seq} has no page table")
        rows = len(self._tables[seq]) * PAGE_ROWS
        if count > rows:
            raise RuntimeError(f"sequence {seq}: row {count - 1} lies beyond its {rows} rows")

    def move(self, moves: Sequence[Move]) -> None:
        """Of each of these sequences, rows start + rows[k] become rows start + k in all layers; the rows behind them
        have no content any more."""
        source: list[int] = []
        target: list[int] = []
        offsets = [0]
        for move in moves:
            places = self.places(move.seq, move.start, move.rows[-1] + 1)
            far = [(row, k) for k, row in enumerate(move.rows) if row != k]
            source += [places[row] for row, _ in far]
            target += [places[k] for _, k in far]
            offsets.append(len(source))
        if source:
            device, count = self.kv.device, len(source)
            rows = torch.tensor([*source, *target, *offsets], pin_memory=device.type == "cuda")
            rows = rows.to(device, non_blocking=True)
            kernels.kv_move(self.kv, rows[:count], rows[count : 2 * count], rows[2 * count :].int())
        if self._poison:
            for move in moves:
                self._spoil(self._lines[move.seq][move.start + len(move.rows) :])

    def _spoil(self, rows: Rows) -> None:
        self.kv[:, torch.from_numpy(rows).to(self.kv.device)] = torch.nan

    def release(self, seqs: Iterable[int]) -> None:
        """Forget sequences. What their pages hold stays, until they are another's."""
        for seq in seqs:
            if seq not in self._tables:
                raise RuntimeError(f"sequence {seq} has no page table")
            del self._shared[seq], self._lines[seq]
            for page in self._tables.pop(seq):
                holders = self._holders[page]
                holders.remove(seq)
                if not holders:
                    del self._holders[page]
