"""spec.accept: the walk against its definition, and the sampling law of sample-and-match by full enumeration."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.spec import accept
from kdtp.types import ROOT, Path, Tree


@st.composite
def trees(draw):
    tokens, parents = [draw(st.integers(0, 3))], [ROOT]
    for parent, token in draw(st.lists(st.tuples(st.integers(0, 15), st.integers(0, 3)), max_size=15)):
        edge = (parent % len(tokens), token)
        if edge not in zip(parents, tokens, strict=True):
            parents.append(edge[0])
            tokens.append(token)
    return Tree(tuple(tokens), tuple(parents))


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    """Every path that starts at the root."""
    paths = [(0,)]
    for node in range(1, len(tree)):
        paths.append((*next(p for p in paths if p[-1] == tree.parents[node]), node))
    return paths


@settings(deadline=None, derandomize=True, max_examples=300)
@given(trees(), st.data())
def test_walk_is_the_longest_path_the_target_agrees_with(tree, data):
    ids = data.draw(st.lists(st.integers(0, 3), min_size=len(tree), max_size=len(tree)))
    agreed = [p for p in paths_of(tree) if all(ids[a] == tree.tokens[b] for a, b in itertools.pairwise(p))]
    rows = max(agreed, key=len)
    assert accept.walk(tree, ids) == Path(rows, ids[rows[-1]])
    assert sum(len(p) == len(rows) for p in agreed) == 1


def test_walks_by_hand():
    assert accept.walk(Tree((7,), (ROOT,)), [3]) == Path((0,), 3)
    tree = Tree((9, 1, 2, 1, 2), (ROOT, 0, 0, 2, 3))
    assert accept.walk(tree, [2, 0, 1, 2, 9]) == Path((0, 2, 3, 4), 9)  # over a sibling to the end
    assert accept.walk(tree, [1, 2, 1, 2, 0]) == Path((0, 1), 2)  # node 2's children are not node 1's
    assert accept.walk(tree, [9, 1, 1, 1, 1]) == Path((0,), 9)  # a token equal to the root's is no match


@pytest.mark.parametrize("count", [0, 4, 6])
def test_one_id_per_node(count):
    with pytest.raises(ValueError, match=f"{count} ids for a tree of 5 nodes"):
        accept.walk(Tree((9, 1, 2, 1, 2), (ROOT, 0, 0, 2, 3)), [0] * count)


def test_sample_and_match_has_the_law_of_the_target():
    """All outcomes of one draw per node of a 7-node tree, V = 3: the emitted run, continued by plain draws to three
    tokens, has exactly the plain law; and E[accepted] is the sum over nodes of the target's prefix mass."""
    rng = np.random.default_rng(3)
    law = {p: rng.dirichlet(np.ones(3)) for n in range(4) for p in itertools.product(range(3), repeat=n)}
    mass = {p: float(np.prod([law[p[:i]][p[i]] for i in range(len(p))])) for p in law}
    tree = Tree((0, 2, 0, 1, 2, 0, 1), (ROOT, 0, 0, 1, 1, 2, 3))
    prefix = [tuple(tree.tokens[n] for n in path[1:]) for path in paths_of(tree)]
    got, accepted = dict.fromkeys((p for p in law if len(p) == 3), 0.0), 0.0
    for draws in itertools.product(range(3), repeat=len(tree)):
        chance = float(np.prod([law[prefix[node]][token] for node, token in enumerate(draws)]))
        path = accept.walk(tree, draws)
        accepted += chance * (len(path.rows) - 1)
        run = (*(tree.tokens[row] for row in path.rows[1:]), path.bonus)
        for rest in itertools.product(range(3), repeat=max(3 - len(run), 0)):
            text = run + rest
            got[text[:3]] += chance * float(np.prod([law[text[:i]][text[i]] for i in range(len(run), 3)]))
    assert max(abs(got[p] - mass[p]) for p in got) < 1e-14
    assert accepted == pytest.approx(sum(mass[p] for p in prefix[1:]), abs=1e-14)
