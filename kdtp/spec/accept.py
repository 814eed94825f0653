"""The walk: from the target's decision at every node to the tokens that are kept."""

from __future__ import annotations

from collections.abc import Sequence

from kdtp.types import Path, SeqRows, Tree


def walk(tree: Tree | SeqRows, ids: Sequence[int]) -> Path:
    """Follow the target's choices from the root while they are nodes of the tree.

    tree: or the rows made of one; ids [M]: the target's choice at each node, given that node's own history. The newly
    emitted tokens are the tokens of rows[1:], then the bonus, which is the next root. Raises ValueError if there is
    not one id per node.
    """
    if len(ids) != len(tree.tokens):
        raise ValueError(f"{len(ids)} ids for a tree of {len(tree.tokens)} nodes")
    # Siblings have distinct tokens, so a child is unique; it comes after its parent, so the walk ends.
    child = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    rows, cur = [0], child.get((0, ids[0]))
    while cur is not None:
        rows.append(cur)
        cur = child.get((cur, ids[cur]))
    return Path(tuple(rows), ids[rows[-1]])
