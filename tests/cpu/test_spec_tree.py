"""spec.tree: heap == full sort by the total order, hazards, optimality."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.proposals import Conditionals, Marginals, Trie
from kdtp.spec import tree
from kdtp.types import ROOT, Tree

INF, NAN = math.inf, math.nan
PROPERTY = settings(deadline=None, derandomize=True, max_examples=200)
# Few values, so that equal scores are common; ulp-sized steps, so that float32 rounding makes some more.
STEPS = (0.0, -0.0, -0.25, -0.5, -0.5000001, -0.75, -1.0, -30.1, -1e-8, -INF)


def marginals(lp: list[list[float]], ids: list[list[int]] | None = None) -> Marginals:
    ids = ids or [[100 * d + r for r in range(len(row))] for d, row in enumerate(lp)]
    width = len(lp[0]) if lp else 1
    return Marginals(
        torch.tensor(lp, dtype=torch.float32).view(len(lp), width), torch.tensor(ids).long().view(len(lp), width)
    )


def by_full_sort(proposal: Marginals | Trie, root: int, budget: int, max_depth: int) -> Tree:
    """The definition: every candidate node, sorted by (score desc, depth, parent index, rank), the first `budget`.

    Two nodes of one depth have parents of one depth, so parent indices compare as the parents' own keys do.
    """
    found = []  # (key, token)

    def below(prefix: tuple[int, ...]) -> list[tuple[float, int, int]]:  # (lp, token, what to append to the prefix)
        if isinstance(proposal, Marginals):
            d = len(prefix)
            if d >= len(proposal.lp):
                return []
            row = proposal.lp[d].tolist()
            return [(lp, int(proposal.ids[d, r]), r) for r, lp in enumerate(row)]
        node = prefix[-1] if prefix else 0
        group = [
            (proposal.lp[i], proposal.tokens[i], i + 1) for i, parent in enumerate(proposal.parents) if parent == node
        ]
        return sorted((c for c in group if math.isfinite(c[0])), key=lambda child: (-min(child[0], 0.0), child[1]))

    def visit(prefix: tuple[int, ...], key: tuple, score: np.float32) -> None:
        group = below(prefix)
        if len(prefix) == max_depth or any(math.isnan(lp) or lp == INF for lp, _, _ in group):
            return
        for rank, (lp, token, step) in enumerate(group):
            with np.errstate(over="ignore"):
                total = np.float32(score + np.float32(min(lp, 0.0)))
            if np.isfinite(total):
                child = (-float(total), len(prefix) + 1, key, rank)
                found.append((child, token))
                visit((*prefix, step), child, total)

    visit((), (), np.float32(0))
    kept = sorted(found)[: max(budget, 0)]
    index = {(): 0, **{key: i + 1 for i, (key, _) in enumerate(kept)}}
    return Tree((root, *(token for _, token in kept)), (ROOT, *(index[key[2]] for key, _ in kept)))


@st.composite
def small_marginals(draw):
    length, width = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    rows = [
        sorted(draw(st.lists(st.sampled_from(STEPS), min_size=width, max_size=width)), reverse=True)
        for _ in range(length)
    ]
    for row in rows:
        kind = draw(st.integers(0, 9))
        if kind == 0:
            row[draw(st.integers(0, width - 1))] = draw(st.sampled_from((NAN, INF)))
        elif kind == 1:
            row[0] = 1e-7  # fast exp and log may exceed 0 by an ulp
    ids = [draw(st.permutations(range(7)))[:width] for _ in range(length)]
    return marginals(rows, ids)


@st.composite
def small_tries(draw):
    tokens, parents, lp, used = [], [], [], set()
    for i in range(draw(st.integers(0, 10))):
        edge = (draw(st.integers(0, i)), draw(st.integers(0, 5)))
        if edge in used:
            edge = (edge[0], 6 + i)
        used.add(edge)
        parents.append(edge[0])
        tokens.append(edge[1])
        lp.append(draw(st.sampled_from((*STEPS, *STEPS, 1e-9, NAN, INF))))
    return Trie(tokens, parents, lp)


LIMITS = (st.integers(-1, 12), st.integers(0, 5))  # budget, max_depth


@PROPERTY
@given(small_marginals(), *LIMITS)
def test_heap_is_the_full_sort(proposal, budget, max_depth):
    assert tree.build(proposal, 42, budget, max_depth) == by_full_sort(proposal, 42, budget, max_depth)


@PROPERTY
@given(small_tries(), *LIMITS)
def test_heap_is_the_full_sort_for_tries(proposal, budget, max_depth):
    assert tree.build(proposal, 42, budget, max_depth) == by_full_sort(proposal, 42, budget, max_depth)


def random_rows(rng: np.random.Generator, length: int, width: int) -> Marginals:
    """Sharp, flat, tied, partly masked or all-equal depths of a vocabulary of 300."""
    logits = rng.standard_normal((length, 300)).astype(np.float32) * rng.choice([0.1, 1, 4, 12], (length, 1))
    style = rng.integers(0, 5)
    if style == 0:
        logits = np.round(logits)
    elif style == 1:
        logits[:] = 0
    elif style == 2:
        logits[rng.random(logits.shape) < 0.95] = -np.inf
    logits = torch.from_numpy(logits.astype(np.float32))
    lp, ids = logits.log_softmax(1).sort(dim=1, descending=True, stable=True)
    lp, ids = lp[:, :width].contiguous(), ids[:, :width].contiguous()
    if rng.random() < 0.2:
        lp[rng.integers(0, length), rng.integers(0, width)] = rng.choice([NAN, INF])
    lp[:, 0] += np.float32(1e-7) * int(rng.integers(0, 2))  # may exceed 0
    return Marginals(lp, ids)


def test_order_of_one_tree_by_hand():
    """Equal scores: the shallower first, then the earlier parent, then the lower rank."""
    got = tree.build(marginals([[-1.0, -1.0], [0.0, -1.0]], [[10, 11], [20, 21]]), 9, 6, 2)
    assert got == Tree((9, 10, 11, 20, 20, 21, 21), (ROOT, 0, 0, 1, 2, 1, 2))


def test_scores_are_float32_path_sums():
    """In double the first path is the better one; in float32 the small term is lost and the tie rule decides."""
    got = tree.build(marginals([[-1.0, -1.0], [-1e-9, -1e-9]], [[10, 11], [20, 21]]), 9, 3, 2)
    assert got == Tree((9, 10, 11, 20), (ROOT, 0, 0, 1))
    rows = [[-0.1, -0.3], [-0.7, -0.9], [-0.2, -0.4]]
    for order in itertools.permutations(rows):
        assert tree.build(marginals(list(order)), 0, 14, 3) == by_full_sort(marginals(list(order)), 0, 14, 3)


@pytest.mark.parametrize(
    ("lp", "nodes"),
    [
        ([[NAN, NAN], [-1.0, -1.0]], 0),
        ([[-1.0, -2.0], [-1.0, NAN], [-1.0, -1.0]], 2),
        ([[-1.0, -2.0], [INF, -1.0], [-1.0, -1.0]], 2),
        ([[-1.0, -2.0], [INF, -INF], [-1.0, -1.0]], 2),
        ([[-1.0, -2.0], [-INF, -INF], [-1.0, -1.0]], 2),
        ([[-1.0, -INF], [-1.0, -INF]], 2),
        ([[-3e38, -3e38], [-3e38, -3e38]], 2),  # the sum overflows: no finite score
        ([[1e-6, -20.0]], 2),
    ],
)
def test_hazards(lp, nodes):
    proposal = marginals(lp)
    assert len(tree.build(proposal, 5, 64, 9)) == 1 + nodes


@pytest.mark.parametrize(("budget", "depth"), [(0, 7), (-3, 7), (7, 0), (7, -1)])
def test_root_only(budget, depth):
    root_only = Tree((5,), (ROOT,))
    proposal = marginals([[-0.1, -3.0]] * 3)
    assert tree.build(proposal, 5, budget, depth) == tree.chain(proposal, 5, budget, depth) == root_only
    assert tree.build(Trie([1, 2], [0, 1], [-0.5, -0.5]), 5, budget, depth) == root_only
    assert tree.build(Trie([], [], []), 5, 9, 9) == root_only


def test_clamped_lp_cannot_beat_its_parent():
    got = tree.build(marginals([[-1.0, -1.1], [1e-6, -9.0]]), 0, 3, 2)
    assert got.parents == (ROOT, 0, 1, 0)


def test_padding_may_repeat_an_id_but_a_candidate_may_not():
    assert len(tree.build(marginals([[-1.0, -INF, -INF]], [[4, 0, 0]]), 5, 8, 8)) == 2
    with pytest.raises(AssertionError, match="twice"):
        tree.build(marginals([[-1.0, -2.0]], [[4, 4]]), 5, 8, 8)
    with pytest.raises(AssertionError, match="not in order"):
        tree.build(marginals([[-2.0, -1.0]]), 5, 8, 8)
    with pytest.raises(AssertionError, match="share a token"):
        tree.build(Trie([4, 4], [0, 0], [-1.0, -1.0]), 5, 8, 8)
    with pytest.raises(AssertionError, match=r"parents\[1\] = 2"):
        tree.build(Trie([4, 5], [0, 2], [-1.0, -1.0]), 5, 8, 8)


def test_siblings_of_a_trie_rank_by_lp_then_id():
    trie = Trie([7, 3, 5, 1, 0], [0, 0, 0, 0, 3], [-1.0, -1.0, -0.5, -2.0, -0.5])
    assert tree.build(trie, 9, 9, 9) == Tree((9, 5, 3, 7, 0, 1), (ROOT, 0, 0, 0, 1, 0))


@PROPERTY
@given(small_marginals(), *LIMITS)
def test_a_trie_of_all_paths_gives_the_tree_of_the_marginals(proposal, budget, max_depth):
    """Ties inside a depth are broken by id in a trie, so the ids are made to rise with the rank."""
    lp = proposal.lp[: usable_depth(proposal)]
    length, width = lp.shape
    proposal = Marginals(lp, torch.arange(width).expand(length, width))
    tokens, parents, lp, level = [], [], [], [0]
    for d in range(length):
        paths = list(itertools.product(level, range(width)))
        level = [len(tokens) + 1 + i for i in range(len(paths))]
        tokens += [r for _, r in paths]
        parents += [parent for parent, _ in paths]
        lp += [float(proposal.lp[d, r]) for _, r in paths]
    trie = Trie(tokens, parents, lp)
    assert tree.build(trie, 1, budget, max_depth) == tree.build(proposal, 1, budget, max_depth)
    assert tree.chain(trie, 1, budget, max_depth) == tree.chain(proposal, 1, budget, max_depth)


def test_scores_after_one_another():
    """Token 7 is best at depth 2 after token 5, token 8 after token 6; nothing is known after 5, 7."""
    first = [[-1.0, -2.0], [NAN, NAN]]  # only the root precedes
    second = [[-0.25, -4.0], [-3.0, -0.5]]
    third = [[NAN, -0.1], [-0.75, -0.75]]
    proposal = Conditionals(torch.tensor([first, second, third]), torch.tensor([[5, 6], [7, 8], [4, 3]]))
    got = tree.build(proposal, 9, 9, 9)
    assert got.tokens == (9, 5, 7, 6, 8, 3, 4, 8, 7, 3)
    assert got.parents == (ROOT, 0, 1, 0, 3, 4, 4, 1, 3, 7)
    assert tree.build(proposal, 9, 3, 1).tokens == (9, 5, 6)
    assert tree.chain(proposal, 9, 9, 9).tokens == (9, 5, 7)


@PROPERTY
@given(small_marginals(), *LIMITS)
def test_chain_is_the_first_rank_while_usable(proposal, budget, max_depth):
    got = tree.chain(proposal, 3, budget, max_depth)
    assert got.parents == tuple(range(-1, len(got) - 1))
    assert got.tokens[1:] == tuple(proposal.ids[: len(got) - 1, 0].tolist())
    masked = proposal.lp[: usable_depth(proposal)].isinf().all(dim=1).tolist()
    assert len(got) - 1 == max(min([*masked, True].index(True), budget, max_depth), 0)


def usable_depth(proposal: Marginals) -> int:
    """Depths before the first that holds a NaN or +inf."""
    bad = (proposal.lp.isnan() | (proposal.lp == INF)).any(dim=1).tolist()
    return [*bad, True].index(True)


def test_chain_of_a_trie_is_the_best_child_path():
    trie = Trie([7, 3, 5, 1, 2], [0, 0, 2, 2, 1], [-1.0, -0.5, -3.0, -2.5, -0.1])
    assert tree.chain(trie, 9, 9, 9) == Tree((9, 3, 1), (ROOT, 0, 1))
    assert tree.chain(trie, 9, 1, 9) == tree.chain(trie, 9, 9, 1) == Tree((9, 3), (ROOT, 0))


def scores_of(built: Tree, proposal: Marginals) -> list[float]:
    lookup = [
        dict(zip(ids.tolist(), lp.tolist(), strict=True)) for lp, ids in zip(proposal.lp, proposal.ids, strict=True)
    ]
    scores = [0.0]
    for token, parent, depth in zip(built.tokens[1:], built.parents[1:], built.depths[1:], strict=True):
        scores.append(scores[parent] + lookup[depth - 1][token])
    return scores


def test_expected_accepted_length_is_maximal():
    """Against every prefix-closed set of `budget` nodes of a tree of depth 3 with 2 candidates each (14 nodes)."""
    nodes = [p for d in (1, 2, 3) for p in itertools.product(range(2), repeat=d)]
    number = {p: i for i, p in enumerate(nodes)}
    closed = [
        bits
        for bits in range(1 << len(nodes))
        if all(len(p) == 1 or bits >> number[p[:-1]] & 1 for p in nodes if bits >> number[p] & 1)
    ]
    member = np.array([[bits >> i & 1 for i in range(len(nodes))] for bits in closed])
    rng = np.random.default_rng(0)
    for _ in range(20):
        logits = torch.from_numpy(rng.standard_normal((3, 2)) * 2).float()
        lp, ids = logits.log_softmax(1).sort(dim=1, descending=True)
        mass = np.array([math.exp(sum(lp[d, r].item() for d, r in enumerate(p))) for p in nodes])
        for budget in (1, 3, 5, 9):
            built = tree.build(Marginals(lp, ids), 0, budget, 3)
            scores = scores_of(built, Marginals(lp, ids))
            assert all(a >= b - 1e-6 for a, b in itertools.pairwise(scores))
            best = (member @ mass)[member.sum(1) <= budget].max()
            assert sum(map(math.exp, scores[1:])) == pytest.approx(best, abs=1e-6)


def test_a_larger_budget_only_appends():
    """Nodes come best first, so every prefix of the list is the tree of that budget."""
    rng = random.Random(1)
    for seed in range(20):
        proposal = random_rows(np.random.default_rng(seed), 5, 8)
        whole = tree.build(proposal, 1, 100, 5)
        n = rng.randint(0, 100)
        part = tree.build(proposal, 1, n, 5)
        assert (part.tokens, part.parents) == (whole.tokens[: n + 1], whole.parents[: n + 1])
