"""draft.ngram: against a brute-force search of the text."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.config import DrafterConfig
from kdtp.draft import Ask, make
from kdtp.proposals import Trie
from kdtp.spec import accept, tree


def drafter_of(text: list[int], **settings):
    drafter = make(DrafterConfig(name="ngram", **settings), {}, 100)
    drafter.admit(1, text, 0)
    return drafter


def one(drafter, depth: int, seq: int = 1) -> Trie | None:
    (proposal,) = drafter.propose([Ask(seq, depth)])
    return proposal


def by_search(text: list[int], longest: int, most: int, depth: int) -> dict[tuple[int, ...], float]:
    """Path -> probability given its parent, from all earlier positions that end like the text."""
    found = []
    for end in range(len(text) - 1):
        n = 0
        while n < min(longest, end + 1) and text[end - n] == text[len(text) - 1 - n]:
            n += 1
        if n:
            found.append((-n, -end))
    weight = {(): 0.0}
    for n, end in sorted(found)[:most]:
        for d in range(depth + 1):
            path = tuple(text[1 - end : 1 - end + d])
            if len(path) == d:
                weight[path] = weight.get(path, 0.0) + 2.0 ** (-n - 1)
    return {path: w / (weight[path[:-1]] + 1) for path, w in weight.items() if path}


def paths_of(trie: Trie | None) -> dict[tuple[int, ...], float]:
    if trie is None:
        return {}
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(trie.tokens, trie.parents, strict=True):
        paths.append((*paths[parent], token))
    assert len(set(paths)) == len(paths)
    return dict(zip(paths[1:], map(math.exp, trie.lp), strict=True))


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=5),
    st.integers(1, 6),
    st.integers(1, 9),
    st.integers(0, 7),
)
def test_against_a_search_of_the_text(prompt, runs, longest, topk, depth):
    drafter, text = drafter_of(prompt, ngram_max=longest, topk=topk), list(prompt)
    for run in (*runs, []):
        got, want = paths_of(one(drafter, depth)), by_search(text, longest, topk, depth)
        assert got == pytest.approx(want)
        for node in ((), *got):
            assert sum(p for path, p in got.items() if path[:-1] == node) < 1
        assert len(got) <= topk * depth
        drafter.absorb(1, run)
        text += run


def test_longer_matches_weigh_more_and_recent_ones_come_first():
    text = [4, 5, 9, 0, 5, 1, 0, 5, 2, 4, 5]
    assert paths_of(one(drafter_of(text), 1)) == pytest.approx({(9,): 2 / 5, (2,): 1 / 5, (1,): 1 / 5})
    assert set(one(drafter_of(text, topk=2), 1).tokens) == {9, 2}
    assert set(one(drafter_of(text, topk=2, ngram_max=1), 1).tokens) == {2, 1}


def test_nothing_to_propose():
    assert one(drafter_of([1]), 7) is None
    assert one(drafter_of([1, 2, 3]), 7) is None
    assert one(drafter_of([1, 2, 1]), 0) is None
    drafter = drafter_of([1, 2, 3])
    drafter.absorb(1, [2])
    assert paths_of(one(drafter, 7)) == {(3,): 0.5, (3, 2): 0.5}


def test_no_token_is_special():
    for special in (0, 1, 99, 2**31 - 1):
        assert (special, 7, 8) in paths_of(one(drafter_of([7, 8, special, 7, 8]), 3))


def test_sequences_do_not_share_text():
    drafter = drafter_of([1, 2, 3, 1])
    drafter.admit(2, [4, 5, 4], 0)
    first, second, again = drafter.propose([Ask(1, 2), Ask(2, 2), Ask(1, 1)])
    assert (first.tokens, second.tokens, again.tokens) == ([2, 3], [5, 4], [2])
    drafter.close(1)
    drafter.admit(1, [6, 7], 0)
    assert one(drafter, 3) is None
    assert one(drafter, 2, 2) == second


def test_a_repeating_text_is_accepted_and_a_long_one_stays_bounded():
    """A text that repeats a passage of 40 tokens with one token in eight replaced."""
    rng = random.Random(4)
    passage = [rng.randrange(100) for _ in range(40)]
    text = [rng.randrange(100) if rng.random() < 0.125 else token for _ in range(100) for token in passage]
    drafter, at, rounds = drafter_of(text[:200], topk=16), 200, 0
    while at < 3900:
        proposal = one(drafter, 7)
        assert proposal is None or len(proposal.tokens) <= 16 * 7
        built = tree.build(proposal or Trie([], [], []), text[at - 1], 16, 7)
        path = accept.walk(built, [text[at + depth] for depth in built.depths])
        drafter.absorb(1, [*(built.tokens[row] for row in path.rows[1:]), path.bonus])
        at, rounds = at + len(path.rows), rounds + 1
    assert 3700 / rounds > 3
