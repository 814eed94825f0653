"""Which positions a verify forward looks at: the B best prefixes under the drafter's distribution, as a tree.

One total order decides everything: score descending, then depth, parent index and rank ascending, where the score of
a node is the float32 sum of the log-probabilities along its path. Log-probabilities are never above 0 and rounding
is monotone, so a child never beats its parent nor a rank its elder; the heap, kernels.tree_build's forms and a full
sort therefore give one identical list, ties included. Source: DDTree, arXiv 2604.12989, sections 3.1-3.3, with a
tie rule of our own.
"""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from kdtp.proposals import Candidates, Conditionals, Grown, Marginals, Merged, Proposal, Trie
from kdtp.types import ROOT, Tree


class _Ranked(NamedTuple):
    """The candidates below one node, best first. cost: -lp, finite and at least 0; below: the state each leads to."""

    cost: Sequence[float]
    ids: Sequence[int]
    below: Sequence[int]


_NONE = _Ranked((), (), ())
_Pair = tuple[int | None, int | None]
_States = Callable[[int], _Ranked]  # what follows in a state: a depth, a candidate, a node; 0 is the root's


def grow(shape: str, proposal: Proposal, root: int, budget: int, max_depth: int) -> Grown:
    """The tree that `build` ("tree"), `chain` or `seeded` gives, with its scores; a proposal that is one, as it is."""
    if isinstance(proposal, Grown):
        return proposal
    spine = min(budget, max_depth) if shape == "seeded" else 0
    return _best_first(_states(proposal, 1 if shape == "chain" else None), root, budget, max_depth, spine)


def build(proposal: Proposal, root: int, budget: int, max_depth: int) -> Tree:
    """The tree of the `budget` best nodes (root not counted) no deeper than `max_depth`.

    A candidate whose log-probability or score is not finite is never taken. A depth of Marginals that holds a NaN or
    +inf is unusable, and all deeper ones; so is what Conditionals say of what follows a token. The result may be the
    root alone, which is legal everywhere.
    """
    return grow("tree", proposal, root, budget, max_depth).tree


def chain(proposal: Proposal, root: int, budget: int, max_depth: int) -> Tree:
    """The most likely path alone: `build` with one candidate below each node."""
    return grow("chain", proposal, root, budget, max_depth).tree


def seeded(proposal: Proposal, root: int, budget: int, max_depth: int) -> Tree:
    """The nodes of `chain` first, then the best of the others, as `build` takes them."""
    return grow("seeded", proposal, root, budget, max_depth).tree


def _best_first(states: _States, root: int, budget: int, max_depth: int, spine: int) -> Grown:
    """spine: how many nodes of the most likely path come first, whatever their score."""
    tokens, parents, costs = [root], [ROOT], [0.0]
    heap: list[tuple[float, int, int, int, _Ranked]] = []  # its tuples sort in the total order

    def score(parent: int, rank: int, group: _Ranked) -> float:
        # Rounding the double sum of two float32 to float32 is the float32 sum.
        return ctypes.c_float(costs[parent] + group.cost[rank]).value if rank < len(group.cost) else math.inf

    def push(depth: int, parent: int, rank: int, group: _Ranked) -> None:
        cost = score(parent, rank, group)
        if depth <= max_depth and cost < math.inf:
            heappush(heap, (cost, depth, parent, rank, group))

    def take(cost: float, parent: int, rank: int, group: _Ranked) -> None:
        tokens.append(group.ids[rank])
        parents.append(parent)
        costs.append(cost)

    state = 0
    while len(tokens) <= spine and (cost := score(len(tokens) - 1, 0, states(state))) < math.inf:
        group = states(state)
        take(cost, len(tokens) - 1, 0, group)
        state = group.below[0]
    spine = len(tokens) - 1

    push(1, 0, 0, states(0))
    while heap and len(tokens) <= budget:
        cost, depth, parent, rank, group = heappop(heap)
        node = depth if rank == 0 and parent < spine else len(tokens)  # node d of the spine is at depth d
        if node == len(tokens):
            take(cost, parent, rank, group)
        push(depth, parent, rank + 1, group)
        push(depth + 1, node, 0, states(group.below[rank]))
    return Grown(Tree(tuple(tokens), tuple(parents)), [0.0 - cost for cost in costs])


def _states(proposal: Candidates, width: int | None) -> _States:
    match proposal:
        case Marginals():
            return _of_marginals(proposal, width)
        case Conditionals():
            return _of_conditionals(proposal, width)
        case Trie():
            return _of_trie(proposal, width)
        case Merged():
            return _of_merged(proposal, width)


def _of_marginals(proposal: Marginals, width: int | None) -> _States:
    table: list[_Ranked] = []
    for row, ids in zip(proposal.lp.tolist(), proposal.ids.tolist(), strict=True):
        if not sum(row) < math.inf:
            break  # a NaN or +inf: the sum of other float32 values, taken as doubles, is finite or -inf
        cost = [-x if x < 0.0 else 0.0 for x in row if x > -math.inf]
        assert cost == sorted(cost), f"depth {len(table) + 1}: candidates not in order: {row}"
        assert len(set(ids[: len(cost)])) == len(cost), f"depth {len(table) + 1}: a token twice in {ids}"
        table.append(_Ranked(cost[:width], ids, [len(table) + 1] * len(cost)))
    table.append(_NONE)
    return table.__getitem__


def _of_conditionals(proposal: Conditionals, width: int | None) -> _States:
    """State 1 + d * K + p: candidate p of depth d + 1 was taken."""
    lp, ids = proposal.lp.tolist(), proposal.ids.tolist()
    size = proposal.ids.shape[1]

    def group(state: int) -> _Ranked:
        d, p = (0, 0) if state == 0 else (1 + (state - 1) // size, (state - 1) % size)
        if d == len(ids):
            return _NONE
        row = lp[d][p]
        if not sum(row) < math.inf:
            return _NONE  # a NaN or +inf: nothing is known of what follows this token
        first = 1 + d * size
        return _sorted([(max(-x, 0.0), ids[d][c], first + c) for c, x in enumerate(row) if x > -math.inf], width)

    return group


def _of_trie(proposal: Trie, width: int | None) -> _States:
    children: list[list[int]] = [[] for _ in range(len(proposal.tokens) + 1)]
    for i, parent in enumerate(proposal.parents):
        assert 0 <= parent <= i, f"parents[{i}] = {parent} of a trie: want 0..{i}"
        children[parent].append(i)
    lp, tokens = array("f", proposal.lp), proposal.tokens

    def group(node: int) -> _Ranked:
        # Sorted when the tree gets there: it visits few of a large trie's nodes.
        found = [(max(-lp[i], 0.0), tokens[i], i + 1) for i in children[node] if -math.inf < lp[i] < math.inf]
        return _sorted(found, width)

    return group


def _of_merged(proposal: Merged, width: int | None) -> _States:
    """A state is a pair of states of the two; None where one has nothing to say any more."""
    both = _states(proposal.network, None), _states(proposal.lookup, None)
    pairs: list[_Pair] = [(0, 0)]
    number: dict[_Pair, int] = {(0, 0): 0}

    def after(below: list[int | None]) -> int:
        pair = below[0], below[1]
        if pair not in number:
            number[pair] = len(pairs)
            pairs.append(pair)
        return number[pair]

    def group(state: int) -> _Ranked:
        costs: dict[int, float] = {}
        below: dict[int, list[int | None]] = {}
        for side, (states, own) in enumerate(zip(both, pairs[state], strict=True)):
            found = _NONE if own is None else states(own)
            for cost, token, following in zip(found.cost, found.ids, found.below, strict=False):
                costs[token] = min(cost, costs.get(token, math.inf))
                below.setdefault(token, [None, None])[side] = following
        return _sorted([(cost, token, after(below[token])) for token, cost in costs.items()], width)

    return group


def _sorted(found: list[tuple[float, int, int]], width: int | None) -> _Ranked:
    """The best `width` of (cost, token, state), in rank order."""
    if not found:
        return _NONE
    found.sort()
    best = _Ranked(*zip(*found[:width], strict=True))
    assert len(set(best.ids)) == len(best.ids), f"siblings share a token: {found}"
    return best
