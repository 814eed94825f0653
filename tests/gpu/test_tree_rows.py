"""The binding of tree_build and tree_accept: as kdtp.spec, for any batch, in a captured graph, and in turn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtp import kernels
from kdtp.kernels.abi import KernelError
from kdtp.kernels.tree import Trees
from kdtp.proposals import Marginals
from kdtp.spec import accept, mask, tree
from kdtp.types import Tree
from tests.gpu.cases_tree import STYLES, choices, marginals

LENGTH, WIDTH, MAX_NODES = 8, 40, 200


def proposals(seqs: int) -> tuple[torch.Tensor, ...]:
    """On the CPU: lp, ids, roots, budgets, depths, starts."""
    rng = np.random.default_rng(11)
    lp = torch.from_numpy(np.stack([marginals(rng, LENGTH, WIDTH, STYLES[i % len(STYLES)]) for i in range(seqs)]))
    ids = torch.from_numpy(np.argsort(rng.random((seqs, LENGTH, 300)), axis=2)[:, :, :WIDTH].copy())
    budgets = torch.from_numpy(rng.integers(0, MAX_NODES, seqs).astype(np.int32))
    depths = torch.from_numpy(rng.integers(0, LENGTH + 1, seqs).astype(np.int32))
    starts = torch.from_numpy(rng.integers(0, 100_000, seqs).astype(np.int32))
    return lp, ids, torch.arange(seqs), budgets, depths, starts


def build(inputs: tuple[torch.Tensor, ...], shape: str = "tree") -> Trees:
    """On the GPU."""
    return built(tuple(x.cuda() for x in inputs), shape=shape)


def built(inputs: tuple[torch.Tensor, ...], max_nodes: int = MAX_NODES, shape: str = "tree") -> Trees:
    """Where they are."""
    return kernels.tree_build(*inputs[:5], max_nodes, shape, inputs[5])


def trees_of(made: Trees) -> list[Tree]:
    """As kdtp.spec has them."""
    counts = made.counts.tolist()
    lists = zip(made.tokens.tolist(), made.parents.tolist(), counts, strict=True)
    return [Tree(tuple(tokens[:n]), tuple(parents[:n])) for tokens, parents, n in lists]


def test_trees_are_those_of_spec() -> None:
    lp, ids, roots, budgets, depths, starts = inputs = proposals(64)
    made = build(inputs)
    got = trees_of(made)
    want = [
        tree.build(Marginals(lp[b], ids[b]), int(roots[b]), int(budgets[b]), int(depths[b])) for b in range(len(lp))
    ]
    assert got == want and max(map(len, got)) > 128
    for b, built in enumerate(want):
        assert made.positions[b, : len(built)].tolist() == mask.positions(int(starts[b]), built.parents)
        words = made.ancestors[b, : len(built)].cpu().numpy().astype("<u8")
        assert [int.from_bytes(row.tobytes(), "little") for row in words] == mask.ancestor_bits(built.parents)


@pytest.mark.parametrize("shape", ["tree", "chain", "seeded"])
@pytest.mark.parametrize("after", [False, True], ids=["marginals", "after-one-another"])
def test_the_cpus_form_gives_the_same_bits(shape: str, after: bool) -> None:
    lp, ids, *limits = proposals(64)
    if after:
        lp, ids = lp[:, :, :16], ids[:, :, :16].contiguous()
        lp = torch.stack([lp.roll(r, 2) - r / 8 for r in range(16)], 2).contiguous()
    inputs = (lp, ids, *limits)
    want, got = built(inputs, shape=shape), build(inputs, shape)
    assert torch.equal(want.counts, got.counts.cpu()) and int(want.counts.max()) > (8 if shape == "chain" else 128)
    for mine, theirs in zip(want, got, strict=True):
        if mine.dim() > 1:
            for b, n in enumerate(want.counts.tolist()):
                assert torch.equal(mine[b, :n], theirs[b, :n].cpu())


@pytest.mark.parametrize(("length", "width"), [(1, 64), (15, 64), (15, 1), (64, 3)])
def test_budgets_of_all_sizes_meet(length: int, width: int) -> None:
    """From nothing to the largest, in a batch whose broken and tied rows lie between sound ones: each tree as alone."""
    rng = np.random.default_rng(length + width)
    lp = torch.from_numpy(np.stack([marginals(rng, length, width, STYLES[i % len(STYLES)]) for i in range(64)]))
    lp[5::16, length // 2, 0], lp[9::16, length // 2, -1] = torch.nan, torch.inf
    ids = torch.from_numpy(np.argsort(rng.random((64, length, 300)), axis=2)[:, :, :width].copy())
    budgets = torch.tensor([0, 1, 1024, 2, 64, 1023, 33] * 10, dtype=torch.int32)[:64]
    limits = torch.full((64,), length, dtype=torch.int32)
    inputs = (lp, ids, torch.arange(64), budgets, limits, torch.arange(64, dtype=torch.int32))
    inputs = tuple(x.cuda() for x in inputs)
    made = built(inputs, 1025)
    assert (made.counts[::7] == 1).all()
    for b, n in enumerate(made.counts.tolist()):
        for mine, theirs in zip(made, built(tuple(x[b : b + 1] for x in inputs), 1025), strict=True):
            assert torch.equal(
                mine[b, :n] if mine.dim() > 1 else mine[b], theirs[0, :n] if mine.dim() > 1 else theirs[0]
            )


@pytest.mark.parametrize("seqs", [1, 2, 7, 64])
def test_a_tree_is_the_same_in_any_batch(seqs: int) -> None:
    inputs = proposals(64)
    alone = [trees_of(build(tuple(x[b : b + 1] for x in inputs)))[0] for b in range(64)]
    assert trees_of(build(tuple(x[:seqs] for x in inputs))) == alone[:seqs]
    assert trees_of(build(tuple(x[-seqs:].flip(0) for x in inputs))) == alone[-seqs:][::-1]


def test_walks_are_those_of_spec() -> None:
    rng = np.random.default_rng(5)
    made = build(proposals(64))
    trees = trees_of(made)
    chosen = torch.full((64, MAX_NODES), -1)
    for b, built in enumerate(trees):
        chosen[b, : len(built)] = torch.from_numpy(choices(rng, built, 0.8))
    walks = kernels.tree_accept(made.tokens, made.parents, made.counts, chosen.cuda())
    want = [accept.walk(built, chosen[b, : len(built)].tolist()) for b, built in enumerate(trees)]
    lengths, bonus = walks.lengths.tolist(), walks.bonus.tolist()
    assert [tuple(row[:n]) for row, n in zip(walks.path.tolist(), lengths, strict=True)] == [p.rows for p in want]
    assert bonus == [path.bonus for path in want] and max(lengths) > 4


def test_a_graph_replays_with_new_inputs() -> None:
    first, second = proposals(8), tuple(x.flip(0) for x in proposals(8))
    inputs = tuple(x.cuda() for x in first)
    built(inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = built(inputs)
        walks = kernels.tree_accept(made.tokens, made.parents, made.counts, made.tokens)
    for values in (first, second, first):
        for x, value in zip(inputs, values, strict=True):
            x.copy_(value)
        graph.replay()
        plain = build(values)
        assert trees_of(made) == trees_of(plain)
        again = kernels.tree_accept(plain.tokens, plain.parents, plain.counts, plain.tokens)
        assert torch.equal(walks.lengths, again.lengths) and torch.equal(walks.bonus, again.bonus)


def test_illegal_sizes_are_named() -> None:
    inputs = tuple(x.cuda() for x in proposals(2))
    with pytest.raises(KernelError, match=r"tree_build: max_nodes 1026: must be 1\.\.1025"):
        built(inputs, 1026)
    with pytest.raises(KernelError, match="tree_build: max_nodes 0"):
        built(inputs, 0)
    wide = [x.repeat(1, 1, 2) for x in inputs[:2]]
    with pytest.raises(KernelError, match=r"tree_build: k 80: must be 1\.\.64"):
        built((*wide, *inputs[2:]), 9)
    with pytest.raises(TypeError, match=r"tree_build: budgets is torch\.int64"):
        built((*inputs[:3], inputs[3].long(), *inputs[4:]), 9)
    with pytest.raises(ValueError, match=r"tree_build: starts has shape \[1\]: must be \[2\]"):
        built((*inputs[:5], inputs[5][:1]), 9)
    with pytest.raises(ValueError, match="tree_build: lp has strides"):
        built((inputs[0].transpose(0, 1).contiguous().transpose(0, 1), *inputs[1:]), 9)
