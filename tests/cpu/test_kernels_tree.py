"""kernels.tree_build for CPU tensors: the trees of kdtp.spec.tree, node by node and bit by bit, for many at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp import kernels
from kdtp.proposals import Conditionals, Grown, Marginals
from kdtp.spec import mask, tree
from kdtp.types import Tree

SHAPES = ("tree", "chain", "seeded")
INF, NAN = math.inf, math.nan
PROPERTY = settings(deadline=None, derandomize=True, max_examples=200)
STEPS = (0.0, -0.0, -0.25, -0.5, -0.5000001, -0.75, -1.0, -30.1, -1e-8, 1e-7, -INF)


def grown(lp, ids, budgets, depths, shape, max_nodes=None):
    """As kdtp.spec.tree has them; roots are 40, 41, ..."""
    limits = (torch.tensor(x, dtype=torch.int32) for x in (budgets, depths))
    roots = torch.arange(40, 40 + len(ids))
    most = 1 + max(0, *budgets) if max_nodes is None else max_nodes
    made = kernels.tree_build(lp, ids, roots, *limits, most, shape)
    assert made.tokens.shape == made.parents.shape == made.scores.shape == (len(ids), most)
    lists = zip(made.tokens.tolist(), made.parents.tolist(), made.scores.tolist(), made.counts.tolist(), strict=True)
    return [Grown(Tree(tuple(t[:n]), tuple(p[:n])), s[:n]) for t, p, s, n in lists]


def wanted(lp, ids, budgets, depths, shape):
    kind = Marginals if lp.dim() == 3 else Conditionals
    each = zip(lp, ids, budgets, depths, strict=True)
    return [tree.grow(shape, kind(lp=row, ids=i), 40 + b, n, d) for b, (row, i, n, d) in enumerate(each)]


@st.composite
def batches(draw):
    """Few values, so that equal scores are common; some rows that cannot be used."""
    seqs, length, width = draw(st.integers(1, 4)), draw(st.integers(0, 4)), draw(st.integers(1, 4))
    conditional = draw(st.booleans())
    rows = seqs * length * (width if conditional else 1)
    values = st.lists(st.sampled_from(STEPS), min_size=width, max_size=width)
    lp = [draw(values) if conditional else sorted(draw(values), reverse=True) for _ in range(rows)]
    for row in lp:
        if draw(st.integers(0, 15)) == 0:
            row[draw(st.integers(0, width - 1))] = draw(st.sampled_from((NAN, INF)))
    ids = [draw(st.permutations(range(7)))[:width] for _ in range(seqs * length)]
    shape = (seqs, length, width, width) if conditional else (seqs, length, width)
    limits = (
        st.lists(st.integers(-1, 14), min_size=seqs, max_size=seqs),
        st.lists(st.integers(-1, 5), min_size=seqs, max_size=seqs),
    )
    tensors = torch.tensor(lp, dtype=torch.float32).view(shape), torch.tensor(ids).long().view(seqs, length, width)
    return *tensors, *(draw(each) for each in limits)


@PROPERTY
@given(batches(), st.sampled_from(SHAPES))
def test_trees_are_the_heaps(batch, shape):
    assert grown(*batch, shape) == wanted(*batch, shape)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("budget", [1, 7, 64, 1024])
@pytest.mark.parametrize(("length", "width", "conditional"), [(7, 16, True), (15, 64, False), (64, 1, False)])
def test_trees_of_size(shape, budget, length, width, conditional):
    """Sharp, flat, tied and masked distributions, ragged budgets and depths."""
    rng = np.random.default_rng(budget)
    logits = rng.standard_normal((4, length, *([width] if conditional else []), 200)).astype(np.float32)
    logits[:2] *= np.float32(4)
    logits[1] = np.round(logits[1])
    logits[2][rng.random(logits[2].shape) < 0.9] = -INF
    lp = torch.from_numpy(logits).log_softmax(-1).nan_to_num(nan=-INF)
    ids = torch.from_numpy(np.argsort(rng.random((4, length, 200)), axis=2)[:, :, :width].copy())
    lp = lp[..., :width].contiguous() if conditional else lp.sort(descending=True).values[..., :width].contiguous()
    budgets, depths = [budget, *rng.integers(0, budget + 1, 3).tolist()], [length, 2, length, length + 1]
    assert grown(lp, ids, budgets, depths, shape) == wanted(lp, ids, budgets, depths, shape)


def test_a_tree_is_cut_to_the_room_and_the_same_in_any_batch():
    lp = torch.randn(5, 6, 8).log_softmax(2).sort(descending=True).values
    ids = torch.arange(8).expand(5, 6, 8).contiguous()
    whole = grown(lp, ids, [40] * 5, [6] * 5, "tree")
    assert grown(lp, ids, [40] * 5, [6] * 5, "tree", max_nodes=9) == [each.cut(8) for each in whole]
    alone = grown(lp[2:3], ids[2:3], [40], [6], "tree")[0]
    assert (alone.tree.tokens[1:], alone.scores) == (whole[2].tree.tokens[1:], whole[2].scores)


def test_a_row_out_of_order_ends_the_tree():
    lp = torch.tensor([[[-0.5, -1.0], [-1.0, -0.5], [-0.5, -1.0]]])
    assert [len(g.tree) for g in grown(lp, torch.arange(2).expand(1, 3, 2).contiguous(), [9], [9], "tree")] == [3]


def test_positions_and_ancestors():
    lp = torch.full((2, 70, 2), -0.1)
    lp[1, :, 1] = -0.3
    ids, ints = torch.arange(2).expand(2, 70, 2).contiguous(), torch.tensor([150, 90], dtype=torch.int32)
    made = kernels.tree_build(lp, ids, torch.tensor([7, 8]), ints, ints, 140, starts=ints)
    assert made.positions is not None and made.ancestors is not None and made.ancestors.shape == (2, 140, 3)
    for b, count in enumerate(made.counts.tolist()):
        parents = made.parents[b, :count].tolist()
        assert made.positions[b, :count].tolist() == mask.positions(int(ints[b]), parents)
        words = made.ancestors[b, :count].numpy().astype("<i8")
        assert [int.from_bytes(row.tobytes(), "little") for row in words] == mask.ancestor_bits(parents)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"shape": "star"}, "shape 'star': must be one of tree, chain, seeded"),
        ({"roots": torch.zeros(3, dtype=torch.int64)}, r"roots has shape \[3\]: must be \[2\]"),
        ({"max_nodes": 0}, "k 4, max_nodes 0: must be at least 1"),
        ({"lp": torch.zeros(2, 3, 4).double()}, "lp is torch.float64: must be torch.float32"),
        ({"lp": torch.zeros(2, 3, 4, 5)}, r"lp has shape \[2, 3, 4, 5\]: must be \[2, 3, 4, 4\]"),
        ({"budgets": torch.zeros(2, 2, dtype=torch.int32)[:, 0]}, r"budgets has strides \[2\]: must be contiguous"),
        ({"starts": torch.zeros(2, dtype=torch.int32, device="meta")}, "starts is on meta: must be on cpu"),
    ],
)
def test_what_is_no_candidates(changes, error):
    ints = torch.zeros(2, dtype=torch.int32)
    fields = {"lp": torch.zeros(2, 3, 4), "ids": torch.zeros(2, 3, 4).long(), "roots": torch.zeros(2).long()}
    fields |= {"budgets": ints, "depths": ints, "max_nodes": 5}
    with pytest.raises((TypeError, ValueError), match=f"^tree_build: {error}"):
        kernels.tree_build(**fields | changes)
