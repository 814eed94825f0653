"""spec.mask against walking the parents by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.spec import mask
from kdtp.types import ROOT


@st.composite
def parent_lists(draw):
    size = draw(st.integers(1, 40))
    shape = draw(st.sampled_from(("random", "chain", "star")))
    pick = {"random": lambda i: draw(st.integers(0, i - 1)), "chain": lambda i: i - 1, "star": lambda i: 0}[shape]
    return [ROOT, *(pick(i) for i in range(1, size))]


def path_to_root(parents, node):
    path = [node]
    while parents[path[-1]] != ROOT:
        path.append(parents[path[-1]])
    return path


@settings(deadline=None, derandomize=True, max_examples=200)
@given(parent_lists(), st.integers(0, 20), st.integers(0, 5))
def test_against_walking_the_parents(parents, start, spare):
    size = len(parents)
    paths = [path_to_root(parents, node) for node in range(size)]
    assert mask.positions(start, parents) == [start + len(path) - 1 for path in paths]
    assert mask.ancestor_bits(parents) == [sum(1 << j for j in path) for path in paths]

    want = np.zeros((size, start + size + spare), dtype=bool)
    for node, path in enumerate(paths):
        want[node, :start] = True
        want[node, [start + j for j in path]] = True
    dense = mask.dense(start, parents, start + size + spare)
    assert dense.dtype == torch.bool and np.array_equal(dense.numpy(), want)
    ancestors = mask.ancestors(parents)
    assert ancestors.dtype == torch.bool and np.array_equal(ancestors.numpy(), want[:, start : start + size])


def test_a_chain_is_causal_also_beyond_one_machine_word():
    for size in (1, 7, 8, 9, 63, 64, 65, 257, 1025):
        chain = [ROOT, *range(size - 1)]
        assert torch.equal(mask.ancestors(chain), torch.ones(size, size, dtype=torch.bool).tril())


def test_dense_needs_room_for_every_node():
    with pytest.raises(AssertionError, match="4 rows for 3 committed and 2 nodes"):
        mask.dense(3, [ROOT, 0], 4)
