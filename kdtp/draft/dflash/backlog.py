"""Committed tokens that wait to be taken into a network's context: many at once cost less than a few at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtp.draft.dflash.network import DFlash

MOST = 256  # rows that wait


class Backlog:
    """What `network` is to absorb before it drafts: each row as it would be alone, whatever waits with it."""

    def __init__(self, network: DFlash) -> None:
        self._network = network
        self._features: list[torch.Tensor] = []
        self._positions: list[int] = []
        self._rows: list[int] = []

    def add(self, features: torch.Tensor, positions: Sequence[int], rows: Sequence[int]) -> None:
        """As DFlash.absorb, of features that nobody else writes to."""
        if not set(self._rows).isdisjoint(rows):
            self.flush()  # a page is another's now: of what is written at once, none would be the last
        self._features.append(features)
        self._positions += positions
        self._rows += rows
        if len(self._rows) >= MOST:
            self.flush()

    def flush(self) -> None:
        """Absorb what waits."""
        if not self._rows:
            return
        features, positions, rows = torch.cat(self._features), self._positions, self._rows
        self._features, self._positions, self._rows = [], [], []
        self._network.absorb(features, torch.tensor(positions), torch.tensor(rows))
