"""Batches as CUDA graphs give the bits that the same kernels give one by one, and padding leaves no trace."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from msgspec.structs import replace

from kdtp.model.comm import Solo
from kdtp.model.graphs import DEEP, bucket, usual
from kdtp.model.shard import Shard
from kdtp.model.weights.load import Weights, open_model
from kdtp.spec import pick
from kdtp.types import PAGE_ROWS, Move, SeqRows
from tests.gpu.conftest import missing
from tests.paths import TINY, V3

PAGES = 64


class Twins:
    """Two shards that are told the same; one runs in graphs. Cache rows without content are NaN."""

    def __init__(self, path, dtype: str) -> None:
        with open_model(path) as source:
            self.eager, self.graphs = (
                Shard(Weights(source, 0, 1, dtype, lambda done, total: None, torch.device("cuda")), Solo(), PAGES, True)
                for _ in range(2)
            )
        self.graphs.capture(3, 5, pick.argmax)
        self.rng = random.Random(7)
        self.lengths: dict[int, int] = {}
        self._free = self.rng.sample(range(PAGES), PAGES)
        self._pages: dict[int, list[int]] = {}

    def rows(self, seq: int, count: int, pick: int, tree: bool = False, back: int = 4) -> SeqRows:
        """The next rows of a sequence: random tokens, a chain or a random tree whose parents are at most `back` rows
        before their children."""
        start, mine = self.lengths.setdefault(seq, 0), self._pages.setdefault(seq, [])
        new = [self._free.pop() for _ in range(-(-(start + count) // PAGE_ROWS) - len(mine))]
        mine += new
        parents = [self.rng.randrange(max(0, i - back), i) if tree and i else i - 1 for i in range(count)]
        tokens = self.rng.choices(range(self.eager.config.vocab_size), k=count)
        return SeqRows(seq, start, tuple(tokens), tuple(parents), pick, tuple(new))

    def forward(self, *seqs: SeqRows) -> torch.Tensor:
        """The logits of both, which are the same, as are the caches afterwards."""
        want, found = (shard.forward_tokens(seqs) for shard in (self.eager, self.graphs))
        assert not found.isnan().any()
        assert same_bits(want, found), [(seq.start, seq.parents) for seq in seqs]
        assert self.graphs.best is None or torch.equal(self.graphs.best, pick.argmax(found))
        assert same_bits(self.eager.cache.kv, self.graphs.cache.kv)
        return found

    def commit(self, seq: SeqRows, kept: Sequence[int]) -> None:
        for shard in (self.eager, self.graphs):
            shard.commit([Move(seq.seq, seq.start, tuple(kept))])
        self.lengths[seq.seq] += len(kept)

    def prefill(self, seq: int, count: int) -> None:
        rows = self.rows(seq, count, 0)
        self.forward(rows)
        self.commit(rows, range(count))


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


MODELS = [(path, dtype) for path in (TINY, V3) for dtype in ("float32", "bfloat16")]


@pytest.fixture(params=MODELS, ids=lambda model: f"{model[0].stem}-{model[1]}")
def twins(request: pytest.FixtureRequest) -> Iterator[Twins]:
    if reason := missing():
        pytest.skip(f"{request.node.name}: {reason}")
    yield Twins(*request.param)


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    path = [node]
    while path[0]:
        path.insert(0, parents[path[0]])
    return path


def test_a_graph_gives_the_bits_of_its_kernels(twins: Twins) -> None:
    assert twins.graphs.graphs == len(usual(3, 5))
    for seq, count in enumerate((1, 70, 130, 1020)):  # the last one comes to a longer context
        twins.prefill(seq, count)
    assert twins.graphs.graphs == len(usual(3, 5)), "prefill chunks that choose no token are no graphs"
    kept = []
    for step in range(24):
        wide = step % 8 == 5  # the largest graphs, too
        seqs = range(4) if wide else twins.rng.sample(range(4), twins.rng.randint(1, 4))
        counts = [
            1 if step % 3 == 0 else twins.rng.randint(70, 120) if wide else twins.rng.randint(1, 30) for _ in seqs
        ]
        batch = [twins.rows(seq, count, count, tree=step % 3 == 2) for seq, count in zip(seqs, counts, strict=True)]
        logits = twins.forward(*batch)
        kept.append((logits, logits.clone()))
        for rows in batch:
            twins.commit(rows, path_to(len(rows.tokens) - 1, rows.parents))
    assert all(same_bits(*pair) for pair in kept), "a later forward has changed an earlier one's logits"
    assert twins.graphs.graphs > len(usual(3, 5)), "no graph was captured when it was first needed"
    assert twins.eager.graphs == 0
    assert twins.lengths[3] > 1024 and max(len(logits) for logits, _ in kept) > 256


def test_a_chunk_beside_a_tree(twins: Twins) -> None:
    twins.prefill(0, 65)
    before = twins.graphs.graphs
    chunk, tree = twins.rows(1, 40, 1), twins.rows(0, 9, 9, tree=True)
    assert twins.forward(chunk, tree).shape[0] == 10
    assert twins.graphs.graphs == before + 1
    for picked in (0, 1):  # too many rows for a graph, or none that chooses
        twins.forward(twins.rows(2 + picked, 40 + 100 * picked, picked))
    assert twins.graphs.graphs == before + 1


def test_sizes_follow_each_other(twins: Twins) -> None:
    """Full graphs and those with one row more than the next smaller one has, after larger and after smaller ones; trees
    with paths of few rows and of many."""
    for back, count in itertools.product((1000, 4), (512, 1, 257, 256, 2, 129, 255, 513, 97, 512, 8, 9)):
        rows = twins.rows(0, count, count, tree=True, back=back)
        assert twins.forward(rows).shape[0] == count
        twins.commit(rows, path_to(count - 1, rows.parents))


def test_paths_of_the_most_rows(twins: Twins) -> None:
    """And of one less and one more, beside chains that are longer."""
    twins.prefill(0, 40)
    for path in (DEEP - 1, DEEP, DEEP + 1):
        rows, beside = twins.rows(0, path + 5, path + 5), twins.rows(1, 60, 60)
        parents = (*range(-1, path - 1), *[0] * 5)
        shape = bucket([replace(rows, parents=parents), beside])
        assert shape is not None and (shape.depth > DEEP) == (path > DEEP)
        twins.forward(replace(rows, parents=parents), beside)
        twins.commit(rows, range(path))
        twins.commit(beside, range(60))
