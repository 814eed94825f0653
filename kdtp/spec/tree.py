"""Which positions a verify forward looks at: the B best prefixes under the drafter's distribution, as a tree.

One total order decides everything: score descending, then depth, parent index and rank ascending, where the score of
a node is the float32 sum of the log-probabilities along its path. Log-probabilities are never above 0 and rounding
is monotone, so a child never beats its parent nor a rank its elder; the heap, the level-synchronous form and a full
sort therefore give one identical list, ties included. Source: DDTree, arXiv 2604.12989, sections 3.1-3.3, with a
tie rule of our own.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

import torch

from kdtp.types import ROOT, Marginals, Proposal, Tree, Trie


class _Ranked(NamedTuple):
    """The candidates below one node, best first: lp finite and at most 0, `below` what follows each of them."""

    lp: list[float]
    ids: list[int]
    below: list[_Ranked]


_LEAF = _Ranked([], [], [])


def build(proposal: Proposal, root: int, budget: int, max_depth: int) -> Tree:
    """The tree of the `budget` best nodes (root not counted) no deeper than `max_depth`.

    A candidate whose log-probability or score is not finite is never taken; a depth of Marginals that holds a NaN or
    +inf is unusable, and all deeper ones. The result may be the root alone, which is legal everywhere.
    """
    return _best_first(_ranked(proposal, max_depth), root, budget)


def chain(proposal: Proposal, root: int, budget: int, max_depth: int) -> Tree:
    """The most likely path alone: `build` with one candidate below each node."""
    return _best_first(_ranked(proposal, max_depth, width=1), root, budget)


def _best_first(first: _Ranked, root: int, budget: int) -> Tree:
    tokens, parents, scores = [root], [ROOT], [0.0]
    heap: list[tuple[float, int, int, int, _Ranked]] = []  # its tuples sort in the total order

    def push(depth: int, parent: int, rank: int, group: _Ranked) -> None:
        if rank < len(group.lp):
            # Rounding the double sum of two float32 to float32 is the float32 sum.
            score = ctypes.c_float(scores[parent] + group.lp[rank]).value
            if score > -math.inf:
                heappush(heap, (-score, depth, parent, rank, group))

    push(1, 0, 0, first)
    while heap and len(tokens) <= budget:
        cost, depth, parent, rank, group = heappop(heap)
        tokens.append(group.ids[rank])
        parents.append(parent)
        scores.append(-cost)
        push(depth, parent, rank + 1, group)
        push(depth + 1, len(tokens) - 1, 0, group.below[rank])
    return Tree(tuple(tokens), tuple(parents))


def _ranked(proposal: Proposal, max_depth: int, width: int | None = None) -> _Ranked:
    depth = max(max_depth, 0)
    return (
        _of_marginals(proposal, depth, width) if isinstance(proposal, Marginals) else _of_trie(proposal, depth, width)
    )


def _of_marginals(proposal: Marginals, max_depth: int, width: int | None) -> _Ranked:
    usable: list[tuple[list[float], list[int]]] = []
    for row, ids in zip(proposal.lp[:max_depth].tolist(), proposal.ids[:max_depth].tolist(), strict=True):
        if not _sound(row):
            break
        lp = [min(x, 0.0) for x in row if x > -math.inf]
        assert lp == sorted(lp, reverse=True), f"depth {len(usable) + 1}: candidates not in order: {row}"
        assert len(set(ids[: len(lp)])) == len(lp), f"depth {len(usable) + 1}: a token twice in {ids}"
        usable.append((lp[:width], ids))
    group = _LEAF
    for lp, ids in reversed(usable):
        group = _Ranked(lp, ids, [group] * len(lp))
    return group


def _of_trie(proposal: Trie, max_depth: int, width: int | None) -> _Ranked:
    depth = [0]
    children: list[list[tuple[float, int, int]]] = [[]]  # of each node: (-lp, token, child), sorted below
    for i, (token, parent, lp) in enumerate(zip(proposal.tokens, proposal.parents, proposal.lp, strict=True)):
        assert 0 <= parent <= i, f"parents[{i}] = {parent} of a trie: want 0..{i}"
        depth.append(depth[parent] + 1)
        children.append([])
        if depth[-1] <= max_depth:
            children[parent].append((-ctypes.c_float(lp).value, token, i + 1))
    groups: list[_Ranked] = [_LEAF] * len(children)
    for node in range(len(children) - 1, -1, -1):  # children follow their parents
        if children[node]:
            groups[node] = _group(children[node], groups, width)
    return groups[0]


def _group(children: list[tuple[float, int, int]], groups: list[_Ranked], width: int | None) -> _Ranked:
    assert len({token for _, token, _ in children}) == len(children), f"siblings share a token: {children}"
    best = sorted((max(c, 0.0), t, n) for c, t, n in children if math.isfinite(c))[:width]
    return _Ranked([-c for c, _, _ in best], [t for _, t, _ in best], [groups[n] for _, _, n in best])


def _sound(row: list[float]) -> bool:
    """Whether no entry is NaN or +inf: the sum of such a row is finite or -inf (float32 values, summed as doubles)."""
    return sum(row) < math.inf


def build_level_synchronous(
    lp: torch.Tensor, ids: torch.Tensor, roots: Sequence[int], budgets: Sequence[int], max_depths: Sequence[int]
) -> list[Tree]:
    """The trees of `build` for B sequences at once, in L dependent steps instead of `budget`.

    lp float32 [B, L, K], ids int64 [B, L, K]: as in Marginals; roots, budgets, max_depths: per sequence.
    The best nodes of depth d are among {the best of depth d - 1} x {ranks of depth d}; the tree is the best of their
    union. All selections are stable, which is the order's tie rule.
    """
    most = max(budgets, default=0)
    lp = _usable(lp, max_depths)
    sequences, length, width = lp.shape
    # All lists are over the candidates found so far; entry 0 is the root, so that parents can name it.
    scores, tokens, parents = [lp.new_zeros(sequences, 1)], [ids.new_zeros(sequences, 1)], [ids.new_zeros(sequences, 1)]
    first = 0  # entry at which the last level starts
    for d in range(min(length, most)):
        f, r = _pairs(scores[-1].shape[1], width, most - d, lp.device)
        score, order = (scores[-1][:, f] + lp[:, d, r]).sort(dim=1, descending=True, stable=True)
        order = order[:, : most - d]
        parents.append(first + f[order])
        tokens.append(ids[:, d].gather(1, r[order]))
        first += scores[-1].shape[1]
        scores.append(score[:, : most - d])
    return _merge(scores, tokens, parents, roots, budgets)


def _usable(lp: torch.Tensor, max_depths: Sequence[int]) -> torch.Tensor:
    """lp with everything that may not be taken at -inf."""
    bad = (lp.isnan() | (lp == math.inf)).any(dim=2).cumsum(dim=1) > 0
    deep = torch.arange(lp.shape[1], device=lp.device) >= torch.tensor(max_depths, device=lp.device)[:, None]
    return lp.masked_fill((bad | deep)[:, :, None], -math.inf).clamp(max=0.0)


def _pairs(frontier: int, width: int, keep: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(frontier index f, rank r) of the candidates that can be among the best `keep` of a level, f major.

    Each of the (f + 1)(r + 1) pairs that are no worse in both comes before (f, r) in the order.
    """
    f = torch.arange(1, frontier + 1, device=device)
    r = torch.arange(1, min(width, keep) + 1, device=device)
    pairs = (f[:, None] * r <= keep).nonzero()
    return pairs[:, 0], pairs[:, 1]


def _merge(
    scores: list[torch.Tensor],
    tokens: list[torch.Tensor],
    parents: list[torch.Tensor],
    roots: Sequence[int],
    budgets: Sequence[int],
) -> list[Tree]:
    score, order = torch.cat(scores, dim=1).sort(dim=1, descending=True, stable=True)  # the root stays first
    place = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    token = torch.cat(tokens, dim=1).gather(1, order)
    parent = place.gather(1, torch.cat(parents, dim=1).gather(1, order))
    sizes = (score > -math.inf).sum(dim=1).tolist()
    trees = []
    for root, budget, size, t, p in zip(roots, budgets, sizes, token.tolist(), parent.tolist(), strict=True):
        n = min(size, 1 + max(budget, 0))
        trees.append(Tree((root, *t[1:n]), (ROOT, *p[1:n])))
    return trees
