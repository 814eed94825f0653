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
        self._waiting: dict[int, tuple[int, int]] = {}  # by context row: the row of features, and the position

    def add(self, features: torch.Tensor, taken: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> None:
        """Rows `taken` of features [M, width] are those of tokens at these positions, for these rows of the context.
        They may be overwritten afterwards."""
        # All rows up to the last are copied, as they lie: on a GPU that takes no index, which would come from the host.
        count = 1 + max(taken)
        if count > MOST:
            for row in rows:
                self._waiting.pop(row, None)  # its page is another's now
            self._absorb(features, taken, positions, rows)
            return
        if self._used + count > MOST:
            self.flush()
        self.features[self._used : self._used + count] = features[:count]
        places = [self._used + row for row in taken]
        self._waiting.update(zip(rows, zip(places, positions, strict=True), strict=True))
        self._used += count

    def flush(self) -> None:
        """Absorb what waits."""
        if self._waiting:
            places, positions = zip(*self._waiting.values(), strict=True)
            rows = tuple(self._waiting)
            if self.graphs is None or not self.graphs.absorb(places, positions, rows):
                self._absorb(self.features, places, positions, rows)
        self._waiting, self._used = {}, 0

    def _absorb(
        self, features: torch.Tensor, taken: Sequence[int], positions: Sequence[int], rows: Sequence[int]
    ) -> None:
        on_gpu = features.is_cuda
        where = torch.tensor([taken, positions, rows], pin_memory=on_gpu).to(features.device, non_blocking=on_gpu)
        self._network.absorb(features[where[0]], where[1], where[2])
