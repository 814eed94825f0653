"""The best draft tree under a drafter's scores (DDTree, arXiv 2604.12989), with one total order of nodes.

A node is a prefix of drafted tokens; its score is the float32 sum of the log-probabilities along its path. The tree is
the `budget` best prefixes by (score descending, depth ascending, parent index ascending, rank ascending), where the
rank of a node among its siblings is by (log-probability descending, token id ascending).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROOT = -1  # "parent" of node 0


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node, root 0; parents precede their children."""
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent == ROOT else depth[parent] + 1)
    return depth


@dataclass(frozen=True)
class Tree:
    """Node 0 is the root; parents[i] < i; siblings have distinct tokens."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]


@dataclass(frozen=True)
class Marginals:
    """One distribution per depth: lp float32 [L, K], ids int64 [L, K], each row by (logit descending, id ascending)."""

    lp: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class Trie:
    """Scores that depend on the parent: node i + 1 has tokens[i], parents[i] (0 is the root) and lp[i] given it."""

    tokens: Sequence[int]
    parents: Sequence[int]
    lp: Sequence[float]


@dataclass(frozen=True)
class Conditionals:
    """Scores given the parent's token: lp float32 [L, K, K] of candidate c of depth d + 1 given candidate p of depth d
    (row 0 alone counts at d = 0, where the root precedes), ids int64 [L, K], distinct in a depth."""

    lp: np.ndarray
    ids: np.ndarray


@dataclass(frozen=True)
class Candidate:
    """A token that may follow a prefix; `state` says which candidates follow it (a depth, or a node of the trie)."""

    lp: np.float32
    token: int
    state: int


Proposal = Marginals | Trie | Conditionals


def marginals(logits: np.ndarray, k: int) -> Marginals:
    """The k best of each depth of draft logits [L, V], normalised over the whole vocabulary."""
    peak = logits.max(axis=-1, keepdims=True)
    log_z = peak + np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))
    ids = np.argsort(-logits, axis=-1, kind="stable")[:, :k]
    return Marginals(np.take_along_axis(logits - log_z, ids, axis=-1).astype(np.float32), ids)


def candidates(proposal: Proposal | None) -> list[list[Candidate]]:
    """Of each state (0 is the root's), the candidates in rank order; a log-probability that is not finite is none."""
    if proposal is None:
        return [[]]
    if isinstance(proposal, Trie):
        return trie_candidates(proposal)
    if isinstance(proposal, Conditionals):
        return conditional_candidates(proposal)
    table: list[list[Candidate]] = []
    for depth, (lp, ids) in enumerate(zip(proposal.lp, proposal.ids, strict=True), start=1):
        if np.isnan(lp).any() or np.isposinf(lp).any():
            break  # the sum over this depth's vocabulary was NaN or infinite: it and all below are unusable
        row = zip(lp, ids, strict=True)
        table.append([Candidate(min(v, np.float32(0)), int(i), depth) for v, i in row if np.isfinite(v)])
    return [*table, []]


def trie_candidates(trie: Trie) -> list[list[Candidate]]:
    """Each trie node's children, sorted into rank order."""
    table: list[list[Candidate]] = [[] for _ in range(len(trie.tokens) + 1)]
    scores = np.asarray(trie.lp, np.float64).astype(np.float32)
    for i, (token, parent, lp) in enumerate(zip(trie.tokens, trie.parents, scores, strict=True)):
        if np.isfinite(lp):
            table[parent].append(Candidate(min(lp, np.float32(0)), token, i + 1))
    return [sorted(siblings, key=lambda c: (-c.lp, c.token)) for siblings in table]


def conditional_candidates(proposal: Conditionals) -> list[list[Candidate]]:
    """State 1 + d * K + p is candidate p of depth d + 1; its siblings' rank order depends on their parent."""
    width, states = proposal.ids.shape[1], proposal.ids.size + 1
    table: list[list[Candidate]] = [[] for _ in range(states)]
    for state in range(states - width):
        d, p = (0, 0) if state == 0 else (1 + (state - 1) // width, (state - 1) % width)
        row = proposal.lp[d, p]
        if np.isnan(row).any() or np.isposinf(row).any():
            continue  # nothing is known of what follows this token
        found = [
            Candidate(min(lp, np.float32(0)), int(token), 1 + d * width + c)
            for c, (lp, token) in enumerate(zip(row, proposal.ids[d], strict=True))
            if np.isfinite(lp)
        ]
        table[state] = sorted(found, key=lambda c: (-c.lp, c.token))
    return table


def build(proposal: Proposal | None, root: int, budget: int, max_depth: int) -> Tree:
    """The tree of at most `budget` nodes beside the root and at most `max_depth` levels below it.

    No proposal, no budget or no depth gives the root alone, which is a plain decoding step.
    """
    return grow(candidates(proposal), root, budget, max_depth)


def chain(proposal: Proposal | None, root: int, budget: int, max_depth: int) -> Tree:
    """The most likely path alone: the tree when every prefix has but its best continuation."""
    return grow([siblings[:1] for siblings in candidates(proposal)], root, budget, max_depth)


def grow(table: Sequence[Sequence[Candidate]], root: int, budget: int, max_depth: int) -> Tree:
    """Pop the best candidate `budget` times; a pop admits the next sibling and the first child.

    A score that overflows to -inf is never taken, as a log-probability of -inf is not.
    """
    tokens, parents = [root], [ROOT]
    heap: list[tuple[float, int, int, int, np.float32, int]] = []

    def admit(score: np.float32, depth: int, parent: int, rank: int, state: int) -> None:
        # `score` and `state` are the parent's. Parent and rank are unique, so the rest of an entry is never compared.
        if depth <= max_depth and rank < len(table[state]):
            total = score + table[state][rank].lp
            if np.isfinite(total):
                heapq.heappush(heap, (-float(total), depth, parent, rank, score, state))

    admit(np.float32(0), 1, 0, 0, 0)
    while heap and len(tokens) <= budget:
        negative, depth, parent, rank, score, state = heapq.heappop(heap)
        chosen = table[state][rank]
        tokens.append(chosen.token)
        parents.append(parent)
        admit(score, depth, parent, rank + 1, state)
        admit(np.float32(-negative), depth + 1, len(tokens) - 1, 0, chosen.state)
    return Tree(tuple(tokens), tuple(parents))
