"""Batches for a GPU are planned on the host: index tensors against those for a CPU, shapes of graphs, padding."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.model.batch import place, plan_host
from kdtp.model.cache import PagedCache
from kdtp.model.graphs import PROMPTS, ROWS, SHORTEST, bucket, padded, usual
from kdtp.model.indices import Shape, exact, padding, plan_device, views
from kdtp.types import PAGE_ROWS, ROOT, SeqRows, depths
from tests.fake_target import VOCAB, model

PAGES = 80
FIXED = settings(max_examples=60, deadline=None, derandomize=True)
COS, SIN = torch.arange(2 * PAGES * PAGE_ROWS).view(2, -1, 1).float()


@st.composite
def batches(draw, most=40, longest=900):
    """Sequences that extend caches, and a cache that has their pages, in random order."""
    cache = PagedCache(model(), PAGES, torch.float32)
    free = random.Random(draw(st.integers(0, 99))).sample(range(PAGES), PAGES)
    seqs = []
    for seq in range(draw(st.integers(1, 5))):
        count, start = draw(st.integers(1, most)), draw(st.sampled_from([0, 1, 63, 64, 65, longest]))
        parents = [ROOT] + [draw(st.integers(max(0, i - 3), i - 1)) for i in range(1, count)]
        if draw(st.booleans()):
            parents = list(range(-1, count - 1))
        tokens = tuple(draw(st.integers(0, VOCAB - 1)) for _ in range(count))
        pick = draw(st.sampled_from([0, 1, count]))
        pages = [free.pop() for _ in range(-(-(start + count) // PAGE_ROWS))]
        cache.append(seq, pages)
        seqs.append(SeqRows(seq, start, tokens, tuple(parents), pick))
    return seqs, cache


def keys_on_cpu(batch):
    """The cache rows that each row sees, in position order."""
    for group in batch.keys:
        for rows, bias in zip(group.rows.view(group.count, -1), group.bias.view(group.count, -1), strict=True):
            yield rows[bias == 0].tolist()


def keys_on_gpu(batch, count):
    """The same, found as csrc/kernels/mla_tree.cuh does it."""
    tables = batch.keys
    for row in range(count):
        seq, depth = int(tables.row_seq[row]), int(tables.row_depth[row])
        start, pages = int(tables.starts[seq]), tables.pages[seq].tolist()
        chain = depth == row - tables.first_row[seq]
        places = [
            k if chain or k < start else start + int(tables.path[row, k - start]) for k in range(start + depth + 1)
        ]
        yield [pages[place // PAGE_ROWS] * PAGE_ROWS + place % PAGE_ROWS for place in places]


def assert_alike(seqs, cache, shape):
    """Planned in `shape`, a batch says what it says on a CPU, and padding is padding."""
    m = sum(len(seq.tokens) for seq in seqs)
    host = plan_host(seqs, cache, COS, SIN)
    buffer = plan_device(seqs, cache, shape)
    made = place(buffer, shape, COS, SIN)
    for name in ("tokens", "cos", "sin", "rows"):
        assert torch.equal(getattr(made, name)[:m], getattr(host, name)[:m]), name
    assert made.picked[: len(host.picked)].tolist() == host.picked.tolist()
    assert list(keys_on_gpu(made, m)) == list(keys_on_cpu(host))
    assert made.keys.max_start >= max(seq.start for seq in seqs)
    spare = shape.rows - m
    assert made.rows[m:].tolist() == made.keys.row_seq[m:].tolist() == [-1] * spare
    assert made.padded == shape.padded
    assert shape.padded or spare == 0


@FIXED
@given(batches())
def test_exact_shapes(case):
    seqs, cache = case
    shape = exact(seqs)
    assert_alike(seqs, cache, shape)
    assert shape.picked == sum(seq.pick for seq in seqs)
    assert shape.depth == max(
        (max(d) + 1 for d in map(depths, (s.parents for s in seqs)) if max(d) < len(d) - 1), default=0
    )


@FIXED
@given(batches(most=90))
def test_shapes_of_graphs(case):
    seqs, cache = case
    m, picked = sum(len(seq.tokens) for seq in seqs), sum(seq.pick for seq in seqs)
    shape = bucket(seqs)
    decoding = any(seq.pick == len(seq.tokens) for seq in seqs)
    if m > (ROWS[-1] if decoding else PROMPTS) or picked == 0:
        assert shape is None
    else:
        assert shape.rows == min(size for size in ROWS if size >= m)
        assert_alike(seqs, cache, shape)


def test_the_next_batch_of_a_request_has_the_same_shape():
    assert padded(17, 1, 5) == padded(24, 1, SHORTEST) != padded(17, 1, SHORTEST + 1)
    assert padded(17, 3, 5) == padded(17, 4, 0) != padded(17, 2, 5)
    assert padded(1, 1, 3000) == Shape(rows=1, seqs=1, depth=1, pages=65, picked=1, max_start=4096)
    # The last row that a shape can have lies within its page table.
    for rows, start in ((1, SHORTEST), (64, SHORTEST), (128, 4096), (7, 131072)):
        shape = padded(rows, 1, start)
        assert (shape.pages - 1) * PAGE_ROWS < shape.max_start + shape.rows <= shape.pages * PAGE_ROWS


def test_what_is_captured_before_it_is_needed():
    pairs = [(shape.rows, shape.seqs) for shape in usual(8, 17)]
    assert pairs == [(1, 1), (2, 2), (4, 4), (8, 8), (24, 1), (48, 2), (96, 4), (256, 8)]
    assert [(shape.rows, shape.seqs) for shape in usual(4, 200)] == [
        (1, 1),
        (2, 2),
        (4, 4),
        (256, 1),
        (512, 2),
    ]  # 4 are too many rows
    assert [(shape.rows, shape.seqs) for shape in usual(6, 1)] == [(1, 1), (2, 2), (4, 4), (8, 8)]
    assert max(shape.rows for shape in usual(1024, 1025)) == ROWS[-1]
    for seqs in range(1, 9):  # plain decoding, whatever the number of sequences
        assert padded(seqs, seqs, 0) in usual(8, 1)


@pytest.mark.parametrize("shape", [padded(5, 3, 70), Shape(3, 2, 0, 1, 0, 0, padded=False)], ids=["padded", "exact"])
def test_views_cover_the_buffer_once(shape):
    buffer = padding(shape)
    for i, view in enumerate(views(buffer, shape)):
        assert view.data_ptr() % view.element_size() == 0
        view.fill_(i + 1)
    sizes = [view.numel() * view.element_size() // 4 for view in views(buffer, shape)]
    assert sum(sizes) == len(buffer) == shape.size
    assert torch.bincount(buffer, minlength=11)[3:].tolist() == sizes[2:]  # int64 entries are 1 and 2, with zeros


def test_mere_padding():
    shape = padded(5, 3, 70)
    batch = place(padding(shape), shape, COS, SIN)
    assert batch.padded and (batch.rows == -1).all() and (batch.keys.row_seq == -1).all()
    assert not batch.tokens.any() and not batch.picked.any()


def test_rows_beyond_a_page_table():
    cache = PagedCache(model(), PAGES, torch.float32)
    cache.append(3, [7])
    seqs = [SeqRows(3, 60, (1,) * 5, tuple(range(-1, 4)), 1)]
    with pytest.raises(RuntimeError, match="sequence 3: row 64 lies beyond its 64 rows"):
        plan_device(seqs, cache, exact(seqs))
