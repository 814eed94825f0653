"""spec.tree: two proposals in one tree, against their definition; trees that begin with the most likely path."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.proposals import Conditionals, Marginals, Merged, Trie
from kdtp.spec import tree

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)
STEPS = st.sampled_from((-0.0, -0.25, -0.5, -0.75, -1.0, -2.5, -math.inf))
TOKENS = st.integers(0, 5)


@st.composite
def networks(draw):
    length, width = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    ids = [draw(st.lists(TOKENS, min_size=width, max_size=width, unique=True)) for _ in range(length)]

    def row():
        return sorted(draw(st.lists(STEPS, min_size=width, max_size=width)), reverse=True)

    if draw(st.booleans()):
        return Marginals(torch.tensor([row() for _ in range(length)]), torch.tensor(ids))
    lp = [[draw(st.lists(STEPS, min_size=width, max_size=width)) for _ in range(width)] for _ in range(length)]
    return Conditionals(torch.tensor(lp), torch.tensor(ids))


@st.composite
def tries(draw):
    edges: dict[tuple[int, int], float] = {}
    for _ in range(draw(st.integers(1, 8))):
        edge = draw(st.integers(0, len(edges))), draw(TOKENS)
        edges.setdefault(edge, draw(STEPS))
    return Trie([token for _, token in edges], [parent for parent, _ in edges], list(edges.values()))


def follow_network(network, path):
    """Log-probability of each token after a path; {} if the network has not proposed the path."""
    d, ids, lp = len(path), network.ids.tolist(), network.lp.tolist()
    known = d < len(ids) and all(token in row for token, row in zip(path, ids, strict=False))
    if not known or not all(math.isfinite(_at(network, path, i)) for i in range(d)):
        return {}
    row = lp[d] if isinstance(network, Marginals) else lp[d][ids[d - 1].index(path[-1]) if path else 0]
    return dict(zip(ids[d], row, strict=True))


def _at(network, path, i):
    ids, lp = network.ids.tolist(), network.lp.tolist()
    if isinstance(network, Marginals):
        return lp[i][ids[i].index(path[i])]
    before = ids[i - 1].index(path[i - 1]) if i else 0
    return lp[i][before][ids[i].index(path[i])]


def follow_trie(trie, path):
    node = 0
    for token in path:
        steps = list(zip(trie.parents, trie.tokens, trie.lp, range(1, len(trie.lp) + 1), strict=True))
        found = [i for parent, t, lp, i in steps if (parent, t) == (node, token) and math.isfinite(lp)]
        if not found:
            return {}
        node = found[0]
    return {t: lp for parent, t, lp in zip(trie.parents, trie.tokens, trie.lp, strict=True) if parent == node}


def all_paths(proposal, max_depth):
    """Every path of the merged proposal with its score, by what each of the two says of each place."""
    found = {}

    def visit(path, score):
        if len(path) == max_depth:
            return
        each = follow_network(proposal.network, path), follow_trie(proposal.lookup, path)
        for token in each[0].keys() | each[1].keys():
            best = max(side.get(token, -math.inf) for side in each)
            if best > -math.inf:
                found[(*path, token)] = float(np.float32(score + best))
                visit((*path, token), found[(*path, token)])

    visit((), 0.0)
    return found


def paths_of(grown):
    paths = [()]
    for token, parent in zip(grown.tokens[1:], grown.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@PROPERTY
@given(networks(), tries(), st.integers(0, 30), st.integers(0, 5))
def test_a_merged_tree_has_the_best_of_both(network, lookup, budget, max_depth):
    merged = Merged(network, lookup)
    (grown, scores), every = tree.grow("tree", merged, 9, budget, max_depth), all_paths(merged, max_depth)
    paths = paths_of(grown)
    assert len(paths) == min(budget, len(every)) and len(set(paths)) == len(paths)
    assert [every[path] for path in paths] == sorted(every.values(), reverse=True)[: len(paths)]
    assert scores == [0.0] + [every[path] for path in paths]


@PROPERTY
@given(networks(), tries(), st.integers(0, 12), st.integers(0, 4))
def test_each_alone_is_part_of_the_merged(network, lookup, budget, max_depth):
    everything = set(paths_of(tree.build(Merged(network, lookup), 9, 10**6, max_depth)))
    for alone in (network, lookup):
        assert set(paths_of(tree.build(alone, 9, budget, max_depth))) <= everything


@PROPERTY
@given(st.one_of(networks(), tries(), st.builds(Merged, networks(), tries())), st.integers(-1, 25), st.integers(0, 4))
def test_a_seeded_tree_is_the_chain_and_the_best_others(proposal, budget, max_depth):
    chain, grown = (paths_of(f(proposal, 9, budget, max_depth)) for f in (tree.chain, tree.seeded))
    assert grown[: len(chain)] == chain
    everything, scores = tree.grow("tree", proposal, 9, 10**6, max_depth)
    score = dict(zip(paths_of(everything), scores[1:], strict=True))
    others = sorted((s for path, s in score.items() if path not in chain), reverse=True)
    assert [score[path] for path in grown[len(chain) :]] == others[: max(0, budget - len(chain))]


def test_a_node_of_both_has_the_better_score():
    network = Marginals(torch.tensor([[-0.5, -1.0], [-0.25, -2.0]]), torch.tensor([[1, 2], [3, 4]]))
    lookup = Trie([2, 5, 3], [0, 1, 2], [-0.125, -0.25, -0.25])
    grown = tree.build(Merged(network, lookup), 0, 7, 3)
    assert paths_of(grown) == [(2,), (2, 3), (2, 5), (1,), (2, 5, 3), (1, 3), (2, 4)]
