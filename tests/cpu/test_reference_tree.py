"""The tree is what its definition says, for ties and unusable scores too; mask and walk."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.accept import walk
from reference.mask import ancestors, dense, positions
from reference.tree import ROOT, Marginals, Tree, Trie, build, candidates, chain, depths, marginals

LP = st.sampled_from([0.0, -0.0, -0.25, -0.5, -0.5, -1.0, -1.0 - 2**-23, -3.0, -40.0, -np.inf])


@st.composite
def some_marginals(draw):
    """Up to 5 depths of up to 5 candidates with many ties; now and then a depth is broken."""
    length, width = draw(st.integers(0, 5)), draw(st.integers(1, 5))
    lp = np.array(draw(st.lists(st.lists(LP, min_size=width, max_size=width), min_size=length, max_size=length)))
    lp = -np.sort(-lp.reshape(length, width).astype(np.float32), axis=-1)
    if length and draw(st.integers(0, 3)) == 0:
        lp[draw(st.integers(0, length - 1)), draw(st.integers(0, width - 1))] = draw(st.sampled_from([np.nan, np.inf]))
    ids = [np.random.default_rng(d).permutation(9)[:width] for d in range(length)]
    return Marginals(lp, np.array(ids, np.int64).reshape(length, width))


@st.composite
def some_tries(draw):
    """Up to 12 nodes."""
    edges = {}
    for _ in range(draw(st.integers(0, 12))):
        edge = (draw(st.integers(0, len(edges))), draw(st.integers(0, 4)))
        edges.setdefault(edge, draw(st.one_of(LP, st.just(np.nan))))
    return Trie([token for _, token in edges], [parent for parent, _ in edges], list(edges.values()))


PROPOSALS = st.one_of(some_marginals(), some_tries())
CHECKED = settings(max_examples=100, deadline=None, derandomize=True)


def by_definition(proposal, budget, max_depth):
    """(parent, token, score) of each node: of all nodes that could be next, the first in the total order."""
    table = candidates(proposal)
    nodes, states, depth, score, taken = [(ROOT, None, np.float32(0))], [0], [0], [np.float32(0)], set()
    while len(nodes) <= budget:
        best = None
        for parent in range(len(nodes)):
            for rank, candidate in enumerate(table[states[parent]]):
                total = np.float32(score[parent] + candidate.lp)
                key = (-total, depth[parent] + 1, parent, rank)
                open_ = (parent, rank) not in taken and depth[parent] < max_depth
                if open_ and (best is None or key < best[0]):
                    best = (key, candidate, total)
        if best is None:
            break
        (_, level, parent, rank), candidate, total = best
        taken.add((parent, rank))
        nodes.append((parent, candidate.token, total))
        states.append(candidate.state)
        depth.append(level)
        score.append(total)
    return nodes[1:]


@CHECKED
@given(PROPOSALS, st.integers(0, 24), st.integers(0, 6))
def test_build_is_its_definition(proposal, budget, max_depth):
    got, want = build(proposal, 7, budget, max_depth), by_definition(proposal, budget, max_depth)
    assert got.tokens == (7, *(token for _, token, _ in want))
    assert got.parents == (ROOT, *(parent for parent, _, _ in want))
    scores = [score for _, _, score in want]
    assert scores == sorted(scores, reverse=True)
    assert len(set(zip(got.parents, got.tokens, strict=True))) == len(got.tokens)
    assert max(depths(got.parents)) <= max_depth


@CHECKED
@given(some_marginals(), st.integers(0, 24))
def test_no_other_prefixes_score_higher(proposal, budget):
    """The tree's scores are the largest of all prefixes, none of which was left out."""
    table = candidates(proposal)[:-1]
    scores = []
    for length in range(1, len(table) + 1):
        for path in product(*table[:length]):
            total = np.float32(0)
            for candidate in path:
                total = np.float32(total + candidate.lp)
            scores.append(total)
    got = [score for _, _, score in by_definition(proposal, budget, 99)]
    assert got == sorted(scores, reverse=True)[:budget]
    assert len(build(proposal, 0, budget, 99).tokens) == 1 + min(budget, len(scores))


@CHECKED
@given(PROPOSALS, st.integers(0, 24), st.integers(0, 6))
def test_a_smaller_budget_is_a_prefix(proposal, budget, max_depth):
    large, small = build(proposal, 7, budget + 1, max_depth), build(proposal, 7, budget, max_depth)
    assert large.tokens[: len(small.tokens)] == small.tokens and large.parents[: len(small.parents)] == small.parents


@CHECKED
@given(PROPOSALS, st.integers(0, 8), st.integers(0, 6))
def test_chain_is_the_first_branch(proposal, budget, max_depth):
    got = chain(proposal, 7, budget, max_depth)
    assert got.parents == tuple(range(-1, len(got.tokens) - 1))
    state, want = 0, [7]
    table = candidates(proposal)
    while table[state] and len(want) <= min(budget, max_depth):
        state, token = table[state][0].state, table[state][0].token
        want.append(token)
    assert got.tokens == tuple(want)


@pytest.mark.parametrize("grow", [build, chain])
def test_root_only(grow):
    usable = Marginals(np.zeros((2, 1), np.float32), np.ones((2, 1), np.int64))
    masked = Marginals(np.full((2, 3), -np.inf, np.float32), np.tile(np.arange(3), (2, 1)))
    broken = Marginals(np.full((2, 3), np.nan, np.float32), np.tile(np.arange(3), (2, 1)))
    for case in (
        (None, 4, 4),
        (usable, 0, 4),
        (usable, 4, 0),
        (masked, 4, 4),
        (broken, 4, 4),
        (Trie([], [], []), 4, 4),
    ):
        assert grow(case[0], 5, *case[1:]) == Tree((5,), (ROOT,))


def test_a_broken_depth_ends_the_tree_above_it():
    lp = np.float32([[-0.1, -3.0], [np.nan, -0.1], [-0.1, -0.2]])
    assert max(depths(build(Marginals(lp, np.tile([3, 4], (3, 1))), 0, 9, 9).parents)) == 1
    lp[1] = [-np.inf, -np.inf]
    assert max(depths(build(Marginals(lp, np.tile([3, 4], (3, 1))), 0, 9, 9).parents)) == 1


def test_scores_that_overflow_are_not_taken():
    with np.errstate(over="ignore"):
        assert chain(Marginals(np.full((3, 1), -3e38, np.float32), np.arange(3)[:, None]), 0, 9, 9).tokens == (0, 0)


def test_marginals_are_the_best_of_a_whole_softmax():
    logits = np.float32([[1, 3, 3, -np.inf, 2], [0, 0, 0, 0, 0]])
    got = marginals(logits, 3)
    assert got.ids.tolist() == [[1, 2, 4], [0, 1, 2]]
    np.testing.assert_allclose(got.lp[0], np.array([3, 3, 2]) - np.log(np.exp([1, 3, 3, 2]).sum()), rtol=1e-6)
    np.testing.assert_allclose(got.lp[1], np.log(0.2), rtol=1e-6)


@st.composite
def some_trees(draw):
    """Up to 20 nodes, siblings distinct."""
    edges = [(ROOT, draw(st.integers(0, 3)))]
    for _ in range(draw(st.integers(0, 19))):
        edge = (draw(st.integers(0, len(edges) - 1)), draw(st.integers(0, 3)))
        if edge not in edges:
            edges.append(edge)
    return Tree(tuple(token for _, token in edges), tuple(parent for parent, _ in edges))


@CHECKED
@given(some_trees(), st.integers(0, 50))
def test_mask_and_positions(tree, start):
    parents, seen = tree.parents, ancestors(tree.parents)
    for i in range(len(parents)):
        path, node = set(), i
        while node != ROOT:
            path.add(node)
            node = parents[node]
        assert set(np.flatnonzero(seen[i])) == path
        assert positions(start, parents)[i] == start + len(path) - 1
    whole = dense(start, parents)
    assert whole.shape == (len(parents), start + len(parents))
    assert whole[:, :start].all() and (whole[:, start:] == seen).all()


@CHECKED
@given(some_trees(), st.data())
def test_walk(tree, data):
    ids = data.draw(st.lists(st.integers(0, 4), min_size=len(tree.tokens), max_size=len(tree.tokens)))
    path = walk(tree, ids)
    assert path.rows[0] == 0
    for above, below in zip(path.rows, path.rows[1:], strict=False):
        assert tree.parents[below] == above and tree.tokens[below] == ids[above]
    last = path.rows[-1]
    assert path.bonus == ids[last]
    assert (last, path.bonus) not in zip(tree.parents, tree.tokens, strict=True)
