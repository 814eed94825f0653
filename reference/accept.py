"""Which drafted tokens the target agrees with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reference.tree import Tree


@dataclass(frozen=True)
class Path:
    """Accepted nodes, root first, and the target's choice at the last of them, which is the next root."""

    rows: tuple[int, ...]
    bonus: int


def walk(tree: Tree, ids: Sequence[int]) -> Path:
    """From the root, follow the target's choice ids[i] at each node i for as long as it is one of its children."""
    child = {(parent, token): i for i, (parent, token) in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    rows = [0]
    while (node := child.get((rows[-1], ids[rows[-1]]))) is not None:
        rows.append(node)
    return Path(tuple(rows), ids[rows[-1]])
