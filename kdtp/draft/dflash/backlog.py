"""Committed tokens that wait to be taken into a network's context: many at once cost less than a few at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtp.draft.dflash.graphs import MOST, Graphs
from kdtp.draft.dflash.network import DFlash


class Backlog:
    """What `network` is to absorb before it drafts: each row as it would be alone, whatever waits with it.

    features [MOST, width], of the network's dtype and device: of the rows that wait, at most as many as a graph takes.
    graphs: of the network, made to read them there, if it has any.
    """

    def __init__(self, network: DFlash, width: int, dtype: torch.dtype) -> None:
        self._network = network
        self.features = torch.zeros(MOST, width, dtype=dtype, device=network.device)
        self.graphs: Graphs | None = None
        self._used = 0  # rows of features
        self._places: list[int] = []  # of each row that waits, where its features are,
        self._positions: list[int] = []
        self._rows: list[int] = []  # and the row of the context that it is for

    def add(self, features: torch.Tensor, taken: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> None:
        """Rows `taken` of features [M, width] are those of tokens at these positions, for these rows of the context.
        They may be overwritten afterwards."""
        # All rows up to the last are copied, as they lie: on a GPU that takes no index, which would come from the host.
        count = 1 + max(taken)
        if self._used + count > MOST:
            self.flush()
        if count > MOST:
            self._absorb(features, taken, positions, rows)
            return
        used = self._used
        self.features[used : used + count] = features[:count]
        self._places += [used + row for row in taken]
        self._positions += positions
        self._rows += rows
        self._used += count

    def flush(self) -> None:
        """Absorb what waits."""
        if self._rows:
            # Of a row that waits twice the newer one counts: its page was given to another sequence.
            newest = {row: i for i, row in enumerate(self._rows)}
            places, positions = ([values[i] for i in newest.values()] for values in (self._places, self._positions))
            if self.graphs is None or not self.graphs.absorb(places, positions, tuple(newest)):
                self._absorb(self.features, places, positions, tuple(newest))
        self._used, self._places, self._positions, self._rows = 0, [], [], []

    def _absorb(
        self, features: torch.Tensor, taken: Sequence[int], positions: Sequence[int], rows: Sequence[int]
    ) -> None:
        on_gpu = features.is_cuda
        where = torch.tensor([taken, positions, rows], pin_memory=on_gpu).to(features.device, non_blocking=on_gpu)
        self._network.absorb(features[where[0]], where[1], where[2])
