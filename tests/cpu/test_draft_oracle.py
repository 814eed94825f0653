"""draft.oracle (and none): knows the golden text, errs as told, and depends on nothing but its own request."""

import itertools
import random

import pytest
import torch

from kdtp.config import DrafterConfig
from kdtp.draft import Ask, Drafter, make
from kdtp.proposals import Marginals
from kdtp.spec import accept, tree
from kdtp.types import ROOT, Tree

VOCAB = 50
PROMPT = (3, 1, 4)
GOLDEN = tuple(random.Random(0).randrange(VOCAB) for _ in range(400))


def oracle(vocab: int = VOCAB, **settings) -> Drafter:
    drafter = make(DrafterConfig(name="oracle", **settings), {PROMPT: GOLDEN}, vocab)
    drafter.admit(1, PROMPT, 0)
    return drafter


def one(drafter: Drafter, depth: int, seq: int = 1) -> Marginals | None:
    (proposal,) = drafter.propose([Ask(seq, depth)])
    return proposal


def test_none_proposes_nothing():
    drafter = make(DrafterConfig(name="none"), {PROMPT: GOLDEN}, VOCAB)
    drafter.admit(1, PROMPT, 0)
    drafter.absorb(1, GOLDEN[:3])
    assert drafter.propose([Ask(1, 7), Ask(1, 3)]) == [None, None]
    drafter.close(1)


@pytest.mark.parametrize(("block", "topk"), [(8, 16), (65, 64), (65, 2), (8, 1)])
def test_a_perfect_oracle_drafts_the_chain_of_truths_first(block, topk):
    drafter = oracle(block=block, topk=topk)
    drafter.absorb(1, GOLDEN[:1])
    depth = block - 1
    proposal = one(drafter, depth)
    assert proposal.lp.dtype == torch.float32 and proposal.lp.shape == proposal.ids.shape == (
        depth,
        min(topk, VOCAB - 1),
    )
    assert torch.allclose(proposal.lp.exp().sum(1), torch.ones(depth))
    truths = Tree(GOLDEN[: depth + 1], tuple(range(-1, depth)))
    for budget in (depth, depth + 9):
        built = tree.build(proposal, GOLDEN[0], budget, depth)
        assert (built.tokens[: depth + 1], built.parents[: depth + 1]) == (truths.tokens, truths.parents)
        assert len(built) == 1 + (budget if topk > 1 else depth)
    assert tree.chain(proposal, GOLDEN[0], depth, depth) == truths


def test_hits_ranks_and_distractors():
    """Over 300 places: the truth is there as often as told, at every rank below the limit, and never twice."""
    hit, rank = (1.0, 0.5, 0.0, 0.8), 3
    drafter = oracle(hit=hit, rank=rank, topk=7)
    seen, ranks = [0] * 6, set()
    for at in range(300):
        drafter.absorb(1, GOLDEN[at : at + 1])
        for d, ids in enumerate(one(drafter, 6).ids.tolist()):
            assert len(set(ids)) == 7 and all(0 <= i < VOCAB for i in ids)
            truth = GOLDEN[at + 1 + d]
            if truth in ids:
                seen[d] += 1
                ranks.add(ids.index(truth))
    assert ranks == {0, 1, 2}
    assert seen[0] == 300 and seen[2] == 0
    assert abs(seen[1] - 150) < 45 and all(abs(seen[d] - 240) < 36 for d in (3, 4, 5))  # 5 sigma; the last value holds


def test_the_text_ends_and_unknown_or_left_texts_get_none():
    drafter = oracle()
    drafter.absorb(1, GOLDEN[:397])
    assert [len(one(drafter, depth).ids) for depth in (1, 3, 7)] == [1, 3, 3]
    assert one(drafter, 0) is None
    drafter.absorb(1, GOLDEN[397:])
    assert one(drafter, 7) is None
    drafter.absorb(1, [0])
    assert one(drafter, 7) is None

    drafter.admit(2, (3, 1), 0)
    drafter.admit(3, PROMPT, 0)
    drafter.absorb(2, GOLDEN[:1])
    drafter.absorb(3, GOLDEN[:4])
    assert one(drafter, 7, 2) is None and one(drafter, 7, 3) is not None
    drafter.absorb(3, (GOLDEN[4], (GOLDEN[5] + 1) % VOCAB, GOLDEN[6]))
    assert one(drafter, 7, 3) is None
    drafter.absorb(3, GOLDEN[7:9])  # once left, it stays left
    assert one(drafter, 7, 3) is None
    for seq in (1, 2, 3):
        drafter.close(seq)
    drafter.admit(1, PROMPT, 0)
    assert len(one(drafter, 7).ids) == 7


def test_a_proposal_depends_on_seed_prompt_and_place_alone():
    settings = {"hit": (0.5,), "rank": 4, "topk": 8}
    alone = oracle(**settings)
    alone.absorb(1, GOLDEN[:10])
    want = one(alone, 7).ids

    other = (9, 9)
    crowd = make(DrafterConfig(name="oracle", **settings), {PROMPT: GOLDEN, other: GOLDEN}, VOCAB)
    for seq, prompt in ((5, other), (6, PROMPT), (7, PROMPT)):
        crowd.admit(seq, prompt, 0)
    crowd.propose([Ask(7, 3)] * 5)
    crowd.absorb(5, GOLDEN[:10])
    for token in GOLDEN[:10]:
        crowd.absorb(6, [token])
        crowd.propose([Ask(6, 5)])
    crowd.absorb(7, GOLDEN[:9])
    first, second, third, short = crowd.propose([Ask(5, 7), Ask(6, 7), Ask(7, 7), Ask(6, 4)])
    assert torch.equal(second.ids, want) and torch.equal(short.ids, want[:4])
    assert not torch.equal(first.ids, want) and not torch.equal(third.ids, want)

    reseeded = oracle(seed=1, **settings)
    reseeded.absorb(1, GOLDEN[:10])
    assert not torch.equal(one(reseeded, 7).ids, want)


def test_small_vocabularies():
    drafter = make(DrafterConfig(name="oracle", topk=16, rank=16, hit=(0.5,)), {(0,): (0, 1, 1, 0, 1)}, 2)
    drafter.admit(1, (0,), 0)
    drafter.absorb(1, [0])
    assert one(drafter, 7).ids.shape == (4, 1)
    with pytest.raises(ValueError, match="vocab_size = 1"):
        make(DrafterConfig(name="oracle"), {}, 1)


def test_every_kind_of_acceptance_happens():
    """Full, partial, over a sibling, and none, with a target that follows the golden text."""
    drafter, rng, kinds, start = oracle(hit=(0.8, 0.7), rank=2, topk=4), random.Random(2), set(), 0
    drafter.absorb(1, GOLDEN[:1])
    while start < 380:
        built = tree.build(one(drafter, 4), GOLDEN[start], 12, 4)
        ids = [rng.randrange(VOCAB) for _ in built.tokens]
        node, at = 0, start
        while node is not None:  # what the golden text says at the nodes that agree with it
            at += 1
            ids[node] = GOLDEN[at]
            edges = zip(itertools.count(), built.parents, built.tokens)
            node = next((i for i, parent, token in edges if parent == node and token == GOLDEN[at]), None)
        path = accept.walk(built, ids)
        kinds.add({0: "none", 4: "full"}.get(len(path.rows) - 1, "partial"))
        elder = [any(built.parents[n] == built.parents[row] for n in range(row)) for row in path.rows[1:]]
        kinds |= {"sibling"} if any(elder) else set()
        drafter.absorb(1, [*(built.tokens[row] for row in path.rows[1:]), path.bonus])
        start += len(path.rows)
        assert path.bonus == GOLDEN[start] and built.parents[0] == ROOT
    assert kinds == {"none", "partial", "full", "sibling"}
