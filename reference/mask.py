"""What verification of a tree reads: positions and visibility."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.tree import depths


def positions(start: int, parents: Sequence[int]) -> list[int]:
    """RoPE position of each node: the root's plus the node's depth. Siblings share it."""
    return [start + depth for depth in depths(parents)]


def ancestors(parents: Sequence[int]) -> np.ndarray:
    """bool [M, M]: whether column j is row i itself or above it. A node sees what its parent sees, and itself."""
    seen = np.zeros((len(parents), len(parents)), bool)
    for i, parent in enumerate(parents):
        if parent >= 0:
            seen[i] = seen[parent]
        seen[i, i] = True
    return seen


def dense(start: int, parents: Sequence[int]) -> np.ndarray:
    """bool [M, start + M]: the whole committed prefix, then the ancestors."""
    return np.concatenate([np.ones((len(parents), start), bool), ancestors(parents)], axis=1)
