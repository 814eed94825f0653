"""The latent KV cache of one sequence."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.config import ModelConfig


class Cache:
    """KV rows of every layer, float32 [layers, capacity, kv_row]; the first `length` are committed.

    A forward writes its rows behind the committed ones; `commit` keeps some of them. All other rows are NaN, so
    that reading one shows.
    """

    def __init__(self, config: ModelConfig, capacity: int) -> None:
        self.rows = np.full((config.num_hidden_layers, capacity, config.kv_row), np.nan, np.float32)
        self.length = 0

    def write(self, layer: int, rows: np.ndarray) -> np.ndarray:
        """Store the rows [M, kv_row] of one forward and return all rows it may see, [length + M, kv_row]."""
        end = self.length + len(rows)
        if end > self.rows.shape[1]:
            raise ValueError(f"{end} rows in a cache of {self.rows.shape[1]}")
        self.rows[layer, self.length : end] = rows
        return self.rows[layer, :end]

    def commit(self, kept: Sequence[int]) -> None:
        """Keep rows length + kept[k], in that order, as the new committed rows; the others are forgotten."""
        # Sources and destinations overlap: gather everything, then write.
        gathered = self.rows[:, self.length + np.asarray(kept, np.int64)]
        self.rows[:, self.length :] = np.nan
        self.rows[:, self.length : self.length + len(kept)] = gathered
        self.length += len(kept)
