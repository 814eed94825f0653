"""tree_build and tree_accept, bit for bit; what lies behind a tree or a path must stay as it was."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch

from kdtp import proposals
from kdtp.spec import tree as spec
from reference.accept import walk
from reference.mask import ancestors
from reference.tree import Conditionals, Marginals, Tree, build, chain, depths
from tests.gpu.cases import Case, Output

INF, NAN = np.inf, np.nan
UNTOUCHED = 0x6B  # each byte of the outputs before
Row = Sequence[float]


def cases() -> Iterator[Case]:
    """Trees of every size, shape and hazard, alone and in ragged batches; walks of every kind."""
    rng = np.random.default_rng(3)
    yield from sizes(rng)
    yield from batches(rng)
    yield from hazards()
    yield from shapes(rng)
    yield from walks(rng)
    yield from malformed()


def sizes(rng: np.random.Generator) -> Iterator[Case]:
    """Budgets and shapes up to the largest, each from sharp, flat, tied and masked distributions."""
    for budget in (0, 1, 7, 16, 64, 256, 1024):
        for length, k in ((7, 16), (15, 64), (64, 1), (1, 64), (0, 8), (64, 3), (5, 17)):
            lp = np.stack([marginals(rng, length, k, style) for style in STYLES])
            count = len(STYLES)
            yield build_case(f"{budget}-{length}x{k}", lp, [budget] * count, [length] * count, 1 + budget)


def batches(rng: np.random.Generator) -> Iterator[Case]:
    """Ragged budgets and depths, below, at and beyond what is legal; the first tree is in every batch."""
    length, k, max_nodes = 9, 24, 100
    for seqs in (0, 1, 2, 5, 33, 64):
        lp = np.stack([marginals(np.random.default_rng(i), length, k, STYLES[i % len(STYLES)]) for i in range(64)])[
            :seqs
        ]
        budgets = [70, *rng.choice([-4, 0, 1, 2, 63, 64, 65, 98, 99, 100, 2000], 63)][:seqs]
        limits = [7, *rng.choice([-1, 0, 1, 4, 8, 9, 10, 99], 63)][:seqs]
        yield build_case(f"batch-{seqs}", lp, budgets, limits, max_nodes)


def shapes(rng: np.random.Generator) -> Iterator[Case]:
    """Scores after one another, in every shape; chains and seeded trees of marginals, with the hazards of both."""
    count = len(STYLES)
    for shape in (0, 1, 2):
        for budget, length, k in ((0, 7, 16), (1, 7, 16), (16, 7, 16), (64, 15, 16), (200, 3, 64), (1024, 64, 2)):
            lp = np.stack([conditionals(rng, length, k, style) for style in STYLES])
            limits = [length, 1, 0, length - 1, length, 99]
            yield build_case(
                f"after-{shape}-{budget}-{length}x{k}", lp, [budget] * count, limits, 1 + budget, shape=shape
            )
        lp = np.stack([conditionals(rng, 6, 5, style) for style in STYLES])
        lp[0, 2, 1, 3], lp[1, 0, 0, 0], lp[2, 3] = NAN, INF, -INF
        lp[3] = np.round(lp[3])
        yield build_case(f"after-{shape}-hazards", lp, [40, 9, 40, 40, 3, -1], [6] * count, 41, shape=shape)
    for shape in (1, 2):
        for budget, length, k in ((5, 7, 16), (16, 7, 16), (64, 15, 64), (1024, 9, 9), (70, 64, 1)):
            lp = np.stack([marginals(rng, length, k, style) for style in STYLES])
            lp[1, length // 2, 0] = NAN
            budgets, limits = [budget, budget, 3, budget, 2000, budget], [length, 99, length, 2, length, 0]
            yield build_case(f"shape-{shape}-{budget}-{length}x{k}", lp, budgets, limits, 1 + budget, shape=shape)


def hazards() -> Iterator[Case]:
    """Unusable rows, all kinds of equal scores, and trees that are a chain or a star."""
    deep = [[-0.5, -1.0, -2.0]] * 4
    yield hazard("nan-at-depth-1", [[NAN, NAN, NAN], *deep])
    yield hazard("nan-deeper", [*deep, [-0.5, -1.0, NAN], *deep])
    yield hazard("infinity", [*deep, [INF, -1.0, -2.0], *deep])
    yield hazard("infinities", [*deep, [INF, -1.0, -INF], *deep])
    yield hazard("masked", [[-0.5, -INF, -INF], *deep, [-INF, -INF, -INF], *deep])
    yield hazard("overflow", [[-3e38, -3e38, -3.1e38]] * 3)
    yield hazard("above-zero", [[1e-6, 1e-7, -9.0]] * 5)
    yield hazard("all-zero", [[0.0, -0.0, 0.0]] * 6)
    yield hazard("all-equal", [[-1.0, -1.0, -1.0]] * 6)
    yield hazard("lost-in-rounding", [[-1.0, -1.0, -1.0], [-1e-9, -1e-9, -2e-9], [-1e-8, -6e-8, -7e-8]] * 2)
    yield hazard("out-of-order", [*deep, [-0.5, -2.0, -1.0], *deep], [*deep, [NAN, NAN, NAN], *deep])
    yield hazard("out-of-order-over-lanes", [*deep, [-0.5, -1.0, -0.9], *deep], [*deep, [NAN, NAN, NAN], *deep])
    yield hazard("subnormal", [[-1e-45, -1e-44, -1e-40]] * 4)
    yield hazard("chain", [[0.0, -50.0, -51.0]] * 64)
    yield hazard("star", [[-0.01, -0.02, -0.03], *[[-90.0, -91.0, -92.0]] * 9])
    yield hazard("wide-then-deep", [[-1.0] * 64, [0.0] * 64, [0.0] * 64, [-1e-3] * 64])


def hazard(name: str, rows: Sequence[Row], means: Sequence[Row] | None = None) -> Case:
    """One proposal at several budgets at once; `means`: the rows that these count as."""
    budgets = [3, 12, 64, 200, 1024]
    lp, seen = (np.tile(np.array(x, np.float32), (len(budgets), 1, 1)) for x in (rows, means or rows))
    case = build_case(name, seen, budgets, [len(rows)] * len(budgets), 1025)
    return replace(case, inputs={**case.inputs, "lp": lp})


STYLES = ("sharp", "medium", "flat", "tied", "equal", "masked")
SPREAD = {"sharp": 12.0, "medium": 4.0, "flat": 0.1, "tied": 2.0, "equal": 0.0, "masked": 3.0}


def marginals(rng: np.random.Generator, length: int, k: int, style: str) -> np.ndarray:
    """The k best log-probabilities of `length` distributions over 200 tokens, float32 [length, k]."""
    logits = rng.standard_normal((length, 200)) * SPREAD[style]
    if style == "tied":
        logits = np.round(logits)
    if style == "masked":
        logits[rng.random(logits.shape) < 0.95] = -INF
        logits[:, 0] = 0.0
    lp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    return -np.sort(-lp.astype(np.float32), axis=1)[:, :k]


def conditionals(rng: np.random.Generator, length: int, k: int, style: str) -> np.ndarray:
    """Log-probabilities of k candidates after each of the depth before, in no order, float32 [length, k, k]."""
    rows = marginals(rng, length * k, k, style)
    return rng.permuted(rows, axis=1).reshape(length, k, k)


def build_case(
    name: str,
    lp: np.ndarray,
    budgets: Sequence[int],
    limits: Sequence[int],
    max_nodes: int,
    seed: int = 5,
    shape: int = 0,
) -> Case:
    """lp float32 [seqs, depth, k], or [seqs, depth, k, k] as in Conditionals; ids, roots and starts are made up."""
    rng = np.random.default_rng(seed)
    seqs, length, k = lp.shape[0], lp.shape[1], lp.shape[-1]
    words = (max_nodes + 63) // 64
    ids = np.argsort(rng.random((seqs, length, 200)), axis=2)[:, :, :k]
    roots, starts = rng.integers(0, 1 << 31, seqs), rng.integers(0, 130_000, seqs).astype(np.int32)
    outputs = {
        "tokens": untouched((seqs, max_nodes), np.int64),
        "parents": untouched((seqs, max_nodes), np.int32),
        "scores": untouched((seqs, max_nodes), np.float32),
        "positions": untouched((seqs, max_nodes), np.int32),
        "ancestors": untouched((seqs, max_nodes, words), np.uint64),
        "counts": untouched((seqs,), np.int32),
    }
    before = {name: array.copy() for name, array in outputs.items()}
    for b, (budget, limit) in enumerate(zip(budgets, limits, strict=True)):
        proposal = (Marginals if lp.ndim == 3 else Conditionals)(lp[b], ids[b])
        with np.errstate(over="ignore"):
            tree = SHAPES[shape](proposal, int(roots[b]), min(budget, max_nodes - 1), limit)
            outputs["scores"][b, : len(tree.tokens)] = scores(proposal, tree)
        n = len(tree.tokens)
        outputs["tokens"][b, :n], outputs["parents"][b, :n] = tree.tokens, tree.parents
        outputs["positions"][b, :n] = starts[b] + np.array(depths(tree.parents))
        outputs["ancestors"][b, :n] = packed(tree, words)
        outputs["counts"][b] = n
    scalars = {"seqs": seqs, "depth": length, "before": lp.shape[2] if lp.ndim == 4 else 1, "k": k, "shape": shape}
    inputs = {
        "lp": lp,
        "ids": ids,
        "roots": roots,
        "budgets": np.array(budgets, np.int32),
        "depths": np.array(limits, np.int32),
        "starts": starts,
    }
    scalars |= {"max_nodes": max_nodes}
    return Case(f"tree_build-{name}", "tree_build", scalars, inputs, exact(outputs, before))


def seeded(proposal: Marginals | Conditionals, root: int, budget: int, limit: int) -> Tree:
    """As the host builds it; tests/cpu holds that to its definition."""
    kind = proposals.Marginals if isinstance(proposal, Marginals) else proposals.Conditionals
    made = spec.seeded(kind(*map(torch.from_numpy, (proposal.lp, proposal.ids))), root, budget, limit)
    return Tree(made.tokens, made.parents)


SHAPES = (build, chain, seeded)  # in the order of csrc/params.h


def scores(proposal: Marginals | Conditionals, tree: Tree) -> list[np.float32]:
    """Sums along the paths."""
    found, places = [np.float32(0)], [0]
    for token, parent, depth in zip(tree.tokens[1:], tree.parents[1:], depths(tree.parents)[1:], strict=True):
        place = proposal.ids[depth - 1].tolist().index(token)
        row = proposal.lp[depth - 1]
        if isinstance(proposal, Conditionals):
            row = row[places[parent] if depth > 1 else 0]
        found.append(found[parent] + min(row[place], np.float32(0)))
        places.append(place)
    return found


def packed(tree: Tree, words: int) -> np.ndarray:
    """Ancestor bits, uint64 [nodes, words]."""
    seen = ancestors(tree.parents)
    wide = np.zeros((len(seen), words * 64), bool)
    wide[:, : seen.shape[1]] = seen
    return np.packbits(wide, axis=1, bitorder="little").view(np.uint64)


def untouched(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """An output as it is before the call."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.full(size, UNTOUCHED, np.uint8).view(dtype).reshape(shape)


def exact(outputs: dict[str, np.ndarray], before: dict[str, np.ndarray]) -> dict[str, Output]:
    """Every bit, also of what must not be written."""
    return {name: Output(array, initial=before[name]) for name, array in outputs.items()}


def walks(rng: np.random.Generator) -> Iterator[Case]:
    """No child chosen, all of a chain, a few of a random tree, in batches of trees of every size."""
    for max_nodes in (1, 2, 31, 33, 64, 65, 257, 1025):
        for seqs in (0, 1, 7, 64) if max_nodes == 65 else (6,):
            trees = [some_tree(rng, int(rng.integers(1, max_nodes + 1)), kind) for kind in range(seqs)]
            chosen = [choices(rng, tree, follow) for tree, follow in zip(trees, rng.random(seqs), strict=True)]
            yield accept_case(f"{max_nodes}-{seqs}", trees, chosen, max_nodes)
    chain = Tree(tuple(range(1025)), tuple(range(-1, 1024)))
    yield accept_case("whole-chain", [chain], [np.arange(1, 1026)], 1025)
    yield accept_case("nothing-to-choose", [chain], [np.full(1025, -1)], 1025)  # NaN logits: no token at any node
    star = Tree(tuple(range(1025)), (-1, *[0] * 1024))
    yield accept_case("last-of-a-star", [star], [np.full(1025, 1024)], 1025)


def some_tree(rng: np.random.Generator, nodes: int, kind: int) -> Tree:
    """A chain, a star, or a random tree with deep or shallow parents; few tokens, which siblings do not share."""
    used: dict[int, int] = {}
    tokens, parents = [int(rng.integers(0, 1 << 31))], [-1]
    for i in range(1, nodes):
        parent = (i - 1, 0, int(rng.integers(0, i)), int(rng.integers(max(0, i - 4), i)))[kind % 4]
        used[parent] = used.get(parent, -1) + 1
        tokens.append(used[parent])
        parents.append(parent)
    return Tree(tuple(tokens), tuple(parents))


def choices(rng: np.random.Generator, tree: Tree, follow: float) -> np.ndarray:
    """The target's token at each node: with probability `follow` that of a child, where there is one."""
    chosen = rng.integers(1 << 20, 1 << 30, len(tree.tokens))
    for node in rng.permutation(np.arange(1, len(tree.tokens))):
        if rng.random() < follow:
            chosen[tree.parents[node]] = tree.tokens[node]
    return chosen


def accept_case(name: str, trees: Sequence[Tree], chosen: Sequence[np.ndarray], max_nodes: int) -> Case:
    """What lies behind a tree is as the outputs are before."""
    paths = [walk(tree, ids.tolist()) for tree, ids in zip(trees, chosen, strict=True)]
    seqs = len(trees)
    inputs = {
        "tokens": untouched((seqs, max_nodes), np.int64),
        "parents": untouched((seqs, max_nodes), np.int32),
        "chosen": untouched((seqs, max_nodes), np.int64),
        "counts": np.array([len(tree.tokens) for tree in trees], np.int32),
    }
    for b, tree in enumerate(trees):
        n = len(tree.tokens)
        inputs["tokens"][b, :n], inputs["parents"][b, :n], inputs["chosen"][b, :n] = (
            tree.tokens,
            tree.parents,
            chosen[b],
        )
    return walked(name, inputs, [(path.rows, path.bonus) for path in paths], max_nodes)


def walked(
    name: str, inputs: dict[str, np.ndarray], paths: Sequence[tuple[Sequence[int], int]], max_nodes: int
) -> Case:
    """A call, and the path and bonus that each of its sequences must give."""
    seqs = len(paths)
    before = {
        "path": untouched((seqs, max_nodes), np.int32),
        "lengths": untouched((seqs,), np.int32),
        "bonus": untouched((seqs,), np.int64),
    }
    outputs = {name: array.copy() for name, array in before.items()}
    for b, (rows, bonus) in enumerate(paths):
        outputs["path"][b, : len(rows)] = rows
        outputs["lengths"][b], outputs["bonus"][b] = len(rows), bonus
    scalars = {"seqs": seqs, "max_nodes": max_nodes}
    return Case(f"tree_accept-{name}", "tree_accept", scalars, inputs, exact(outputs, before))


def malformed() -> Iterator[Case]:
    """Each fault in a batch between two good trees, which it must not disturb."""
    good = [-1, 0, 1, 2, 3, 4, 5, 6]
    for name, parents, count in (
        ("no-nodes", good, 0),
        ("fewer-than-none", good, -5),
        ("too-many-nodes", good, 9),
        ("far-too-many-nodes", good, 1 << 30),
        ("no-root", [0, 0, 1, 2, 3, 4, 5, 6], 8),
        ("two-roots", [-1, 0, -1, 2, 3, 4, 5, 6], 8),
        ("own-parent", [-1, 0, 1, 3, 3, 4, 5, 6], 8),
        ("cycle", [-1, 2, 1, 2, 3, 4, 5, 6], 8),
        ("parent-behind", [-1, 0, 1, 2, 3, 4, 5, 1 << 30], 8),
        ("parent-before", [-1, 0, 1, 2, 3, 4, 5, -(1 << 30)], 8),
    ):
        inputs = {
            "tokens": np.tile(np.arange(8), (3, 1)),
            "parents": np.array([good, parents, good], np.int32),
            "chosen": np.tile(np.arange(1, 9), (3, 1)),
            "counts": np.array([8, count, 5], np.int32),
        }
        yield walked(name, inputs, [(range(8), 8), ((), -1), (range(5), 5)], 8)
    inputs = {
        "tokens": np.array([[0, 7, 7, 8, 9]]),
        "parents": np.array([[-1, 0, 0, 1, 2]], np.int32),
        "chosen": np.array([[7, 8, 9, 5, 6]]),
        "counts": np.array([5], np.int32),
    }
    yield walked("siblings-share-a-token", inputs, [((0, 1, 3), 5)], 5)  # the first of them
