"""A row's logits depend on its own text only, bit for bit: chunks, trees, batches, pages and poison change nothing.

So the verification of an accepted tree gives exactly what plain decoding gives. All caches are NaN where they hold
nothing, and pages come in random order.
"""

import itertools
import random

import pytest
import torch
from compare import assert_same_bits
from model_cases import GOLDEN, Ranks

CASES = [  # model, ranks, dtype, threads
    ("model_tiny", 1, "float32", 1),
    ("model_v3", 1, "float32", 4),
    ("model_v3", 2, "float32", 1),
    ("model_v3", 1, "bfloat16", 1),
]
LENGTH = 72
BORDERS = [0, 1, 63, 64, 65]


class Text:
    """A random text and its plain decoding, one token after the other."""

    def __init__(self, name, tp, dtype, threads):
        self.ranks = Ranks(GOLDEN[name], tp, dtype, threads=threads)
        self.rng = random.Random(3)
        self.vocab = self.ranks.config.vocab_size
        self.tokens = self.draw(LENGTH)
        self.logits = self.ranks.decode(0, 0, self.tokens)
        self._seq = 0

    def draw(self, count):
        return self.rng.choices(range(self.vocab), k=count)

    def open(self, length):
        """A new sequence that has run the text's first `length` tokens, in one chunk."""
        self._seq += 1
        if length:
            self.ranks.run(self._seq, 0, self.tokens[:length], pick=0)
        return self._seq


@pytest.fixture(scope="module", params=CASES, ids=lambda case: "-".join(map(str, case)))
def text(request):
    return Text(*request.param)


def test_any_chunking(text):
    for _ in range(4):
        cuts = sorted({0, LENGTH, *text.rng.sample(range(LENGTH), text.rng.randint(0, 5))})
        seq = text.open(0)
        found = torch.cat([text.ranks.run(seq, a, text.tokens[a:b]) for a, b in itertools.pairwise(cuts)])
        assert_same_bits(found, text.logits)
        text.ranks.release(seq)


def grow(text, start, size):
    """A tree at `start` that holds the text's continuation in random places: tokens, parents, nodes of the text."""
    depth = min(6, LENGTH - start)
    tokens, parents, truth = [text.tokens[start]], [-1], [0]
    while len(truth) < depth or len(tokens) < size:
        if len(truth) < depth and (text.rng.random() < 0.4 or len(tokens) >= size):
            token, parent = text.tokens[start + len(truth)], truth[-1]
            if (parent, token) not in zip(parents, tokens, strict=True):
                truth.append(len(tokens))
        else:
            token, parent = text.rng.randrange(text.vocab), text.rng.randrange(len(tokens))
            depth_below = truth.index(parent) + 1 if parent in truth else depth
            if depth_below < depth and token == text.tokens[start + depth_below]:
                continue  # left to the text
        if (parent, token) not in zip(parents, tokens, strict=True):
            tokens.append(token)
            parents.append(parent)
    return tokens, parents, truth


@pytest.mark.parametrize("start", BORDERS)
def test_tree_then_commit_then_decode(text, start):
    seq = text.open(start)
    tokens, parents, truth = grow(text, start, 17)
    found = text.ranks.run(seq, start, tokens, parents)
    assert_same_bits(found[truth], text.logits[start : start + len(truth)])
    kept = truth[: text.rng.randint(1, len(truth))]
    text.ranks.commit(seq, start, kept)
    rest = text.tokens[start + len(kept) :]
    assert_same_bits(
        text.ranks.decode(seq, start + len(kept), rest[:2]), text.logits[start + len(kept) :][: len(rest[:2])]
    )
    text.ranks.release(seq)


def test_branches_that_are_not_taken(text):
    start = 62
    seq = text.open(start)
    tokens, parents, _ = grow(text, start, 17)
    found = text.ranks.run(seq, start, tokens, parents)
    for node in (5, 11, 16):
        path = [node]
        while path[0]:
            path.insert(0, parents[path[0]])
        other = text.open(start)
        alone = text.ranks.decode(other, start, [tokens[i] for i in path])
        assert_same_bits(found[path], alone)
        text.ranks.release(other)
    text.ranks.release(seq)


def test_any_batch(text):
    starts = text.rng.sample([*BORDERS, 10, 20], 4)
    seqs = {text.open(start): start for start in starts}
    trees = {seq: grow(text, start, text.rng.randint(1, 19)) for seq, start in seqs.items()}
    for size in (1, 2, 4):
        batch = text.rng.sample(sorted(seqs), size)
        rows = [text.ranks.rows(seq, seqs[seq], *trees[seq][:2]) for seq in batch]
        parts = torch.split(text.ranks.forward(*rows), [len(trees[seq][0]) for seq in batch])
        for seq, logits in zip(batch, parts, strict=True):
            truth = trees[seq][2]
            assert_same_bits(logits[truth], text.logits[seqs[seq] : seqs[seq] + len(truth)])
    for seq in seqs:
        text.ranks.release(seq)


def test_picked_rows_only(text):
    seq = text.open(0)
    assert text.ranks.run(seq, 0, text.tokens[:30], pick=0).shape == (0, text.vocab)
    assert_same_bits(text.ranks.run(seq, 30, text.tokens[30:50], pick=3), text.logits[47:50])
    text.ranks.release(seq)


def test_a_chain_shaped_tree_is_the_chain(text):
    seq = text.open(40)
    chain = text.ranks.run(seq, 40, text.tokens[40:50])
    tree = text.ranks.run(seq, 40, text.tokens[40:50], parents=range(-1, 9))
    assert_same_bits(tree, chain)
    text.ranks.release(seq)


def test_another_parent_is_another_text(text):
    # The bits above could be equal because nothing matters; this does.
    seq = text.open(40)
    tree = text.ranks.run(seq, 40, text.tokens[40:44], parents=[-1, 0, 0, 2])
    with pytest.raises(AssertionError):
        assert_same_bits(tree[3], text.logits[43])
    text.ranks.release(seq)
