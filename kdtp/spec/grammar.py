"""Trees under a grammar: what may follow each node, and no node that may not be there."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from kdtp.types import ROOT, Tree


class Matcher(Protocol):
    """A grammar at some place of a text.

    ends: ids that end a text, allowed where it matches. mask: bit i of byte i // 8 says whether id i may come next;
    nothing is allowed once the grammar has failed, for a reason that `error` then tells. advance: go on by an allowed
    token, not an end; rollback: take back the last ones.
    """

    @property
    def error(self) -> str: ...
    @property
    def ends(self) -> frozenset[int]: ...
    def mask(self) -> bytes: ...
    def advance(self, token: int) -> None: ...
    def rollback(self, count: int) -> None: ...


def constrain(tree: Tree, matcher: Matcher, ends: Collection[int]) -> tuple[Tree, list[bytes]]:
    """The tree without the nodes that the grammar forbids, and without what follows an end; and each node's mask.

    matcher: at the root, where it is again afterwards.
    """
    children: list[list[int]] = [[] for _ in tree.tokens]
    for node, parent in enumerate(tree.parents):
        if parent != ROOT:
            children[parent].append(node)
    masks: dict[int, bytes] = {}

    def visit(node: int) -> None:
        masks[node] = matcher.mask()
        for child in children[node]:
            token = tree.tokens[child]
            if not allows(masks[node], token):
                continue
            if token in ends:
                masks[child] = masks[node]  # nothing is chosen there that is ever seen
                continue
            matcher.advance(token)
            visit(child)
            matcher.rollback(1)

    visit(0)
    kept = sorted(masks)
    place = {node: i for i, node in enumerate(kept)} | {ROOT: ROOT}
    tokens, parents = (tree.tokens[node] for node in kept), (place[tree.parents[node]] for node in kept)
    return Tree(tuple(tokens), tuple(parents)), [masks[node] for node in kept]


def allows(mask: bytes, token: int) -> bool:
    """Whether a mask allows an id; it may be shorter than the vocabulary."""
    return token >> 3 < len(mask) and bool(mask[token >> 3] >> (token & 7) & 1)
