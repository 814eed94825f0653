"""draft.dflash against reference.dflash, for every flag; contexts grown in any way; any number of ranks and blocks."""

import contextlib
import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from compare import assert_close, assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import ThreadComm

from kdtp.draft.dflash import backlog, frames, graphs
from kdtp.draft.dflash import config as configs
from kdtp.draft.dflash.backlog import Backlog
from kdtp.draft.dflash.network import Block, DFlash, TargetPart
from kdtp.draft.dflash.select import best, log_probabilities
from kdtp.model.comm import Solo
from kdtp.model.weights.table import span
from kdtp.spec.tree import grow
from kdtp.types import SHAPES
from tests.dflash_cases import CASES, TAPS, VOCAB, case_config, random_drafter, write_folder

K, ROWS = 16, 64
LENGTHS = (1, 3, 11, 30)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    torch.set_num_threads(1)


def network(folder, reference, comm=None, **flags):
    """One rank's network, with its part of the reference's embedding and head, over a context full of NaN."""
    comm = comm or Solo()
    first, last = span(VOCAB, comm.rank, comm.size)
    embed, head = torch.from_numpy(reference.embed[first:last]), torch.from_numpy(reference.head[:, first:last].copy())
    return DFlash(folder, configs.read(folder, **flags), TargetPart(embed, head, first), comm, ROWS, poison=True)


def folder_of(name, tmp_path):
    reference = random_drafter(name)
    return write_folder(tmp_path / name, CASES[name], reference.weights), reference


def features_of(reference, length, seed=1):
    rng = np.random.default_rng(seed + length)
    return rng.standard_normal((length, len(TAPS) * reference.config.hidden_size)).astype(np.float32)


def absorb(net, features, rows, start=0, step=None):
    """Rows start.. of a text, at most `step` at a time."""
    step = step or max(1, len(features))
    for first in range(start, len(features), step):
        part = slice(first, min(first + step, len(features)))
        net.absorb(torch.from_numpy(features[part]), torch.arange(part.start, part.stop), rows[part])


def draft(net, features, root, rows=None):
    """A proposal for one text, absorbed at once."""
    rows = torch.arange(len(features)) if rows is None else rows
    absorb(net, features, rows)
    return net.draft([Block(root, rows)], K).proposals()[0]


def wanted(reference, features, root):
    if reference.config.selector_rank:
        return reference.conditionals(features, root)
    return reference.marginals(features, root, K)


def assert_proposal(found, want, atol=1e-5):
    np.testing.assert_array_equal(found.ids.numpy(), want.ids)
    lp, want_lp = found.lp.numpy(), want.lp
    if lp.ndim == 3:  # one token precedes the first depth
        lp, want_lp = np.concatenate([lp[0, :1], *lp[1:]]), np.concatenate([want_lp[0, :1], *want_lp[1:]])
    assert_close(lp, want_lp, atol=atol)
    assert (lp <= 0).all() and lp.std() > 0.1


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_the_references(name, tmp_path):
    folder, reference = folder_of(name, tmp_path)
    net = network(folder, reference)
    for length in LENGTHS:
        features = features_of(reference, length)
        found = draft(net, features, length % VOCAB)
        assert_proposal(found, wanted(reference, features, length % VOCAB))
        with torch.inference_mode():
            hidden = net._hidden(net.gather([Block(length % VOCAB, torch.arange(length))]))[0]
        assert_close(hidden, reference.hidden(features, length % VOCAB), atol=1e-5)


FLAGS = ("causal", "sliding", "sliding_both_ways", "yarn", "kimi", "attention_factor", "scales")


@pytest.mark.parametrize("name", FLAGS)
def test_a_flag_that_is_not_read_would_show(name):
    reference = random_drafter(name)
    other = dataclasses.replace(reference, config=case_config("v1"))
    features = features_of(reference, 11)
    assert np.abs(reference.hidden(features, 3) - other.hidden(features, 3)).max() > 1e-2


@pytest.mark.parametrize("name", ["v1", "sliding", "yarn", "v2"])
def test_a_context_grown_by_parts_is_the_same_and_blocks_leave_no_trace(name, tmp_path):
    folder, reference = folder_of(name, tmp_path)
    features = features_of(reference, 23)
    once, grown = network(folder, reference), network(folder, reference)
    want = draft(once, features, 5)
    rows = torch.arange(23)
    for end in (1, 4, 5, 16, 23):
        start = {1: 0, 4: 1, 5: 4, 16: 5, 23: 16}[end]
        absorb(grown, features[:end], rows, start=start, step=4)
        got = grown.draft([Block(5, rows[:end])], K).proposals()[0]
    assert_proposal(got, wanted(reference, features, 5))
    assert_close(got.lp, want.lp, atol=1e-5)
    assert torch.equal(grown._context.isnan(), once._context.isnan())
    assert grown._context[:, :, 23:ROWS].isnan().all()  # only what was absorbed is there


@pytest.mark.parametrize("name", ["v1", "sliding_both_ways", "causal", "v2", "v2_full"])
def test_a_ragged_batch_drafts_as_each_alone(name, tmp_path):
    folder, reference = folder_of(name, tmp_path)
    net, alone = network(folder, reference), network(folder, reference)
    shuffled = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    texts = [features_of(reference, length) for length in LENGTHS]
    rows = list(shuffled[: sum(LENGTHS)].split(list(LENGTHS)))  # pages lie anywhere
    for features, own in zip(texts, rows, strict=True):
        absorb(net, features, own)
    blocks = [Block(10 + i, own) for i, own in enumerate(rows)]
    for batch in (blocks, blocks[2:3], blocks[::-1], [*blocks, Block(96, rows[0][:0])]):
        for block, got in zip(batch, net.draft(batch, K).proposals(), strict=True):
            if len(block.rows):
                features = texts[LENGTHS.index(len(block.rows))]
                want = draft(alone, features, block.root)
                assert_close(got.lp, want.lp, atol=1e-5)
                assert torch.equal(got.ids, want.ids)
            assert not got.lp.isnan().any()


@pytest.mark.parametrize("name", ["v1", "sliding_both_ways", "v2"])
def test_padding_changes_nothing(name, tmp_path):
    """More sequences and a wider table than there is something for, as a CUDA graph has them."""
    folder, reference = folder_of(name, tmp_path)
    net, features = network(folder, reference), features_of(reference, 11)
    want = draft(net, features, 5)
    with torch.inference_mode():
        padded = net.forward(net.gather([Block(5, torch.arange(11))], seqs=4, width=50), K)
    assert padded.lp.shape[0] == 4 and not padded.lp.isnan().any()
    got = padded.proposals()[0]
    assert_close(got.lp, want.lp, atol=1e-5)
    assert torch.equal(got.ids, want.ids)


def on_ranks(folder, reference, size, call):
    """What call(network) gives on every rank; comms meet in threads."""
    barrier, places = threading.Barrier(size), [None] * size

    def run(rank):
        try:
            return call(network(folder, reference, ThreadComm(rank, size, barrier, places)))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["v1", "bias", "scales", "v2", "v2_full"])
def test_ranks_draft_what_one_does(name, size, tmp_path):
    folder, reference = folder_of(name, tmp_path)
    features = features_of(reference, 11)
    found = on_ranks(folder, reference, size, lambda net: draft(net, features, 5))
    for each in found:
        assert_proposal(each, wanted(reference, features, 5))
        assert_same_bits(each.lp, found[0].lp)  # so that no rank builds another tree


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_merge_ties_ends_and_broken_rows(size):
    """Equal logits on different ranks, rows of -inf, and a NaN on one rank only."""
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.integers(-2, 3, (6, 13)).astype(np.float32))
    logits[1], logits[2, 9], logits[3, 2], logits[4, :12] = -torch.inf, torch.nan, torch.inf, -torch.inf
    barrier, places = threading.Barrier(size), [None] * size

    def run(rank):
        comm = ThreadComm(rank, size, barrier, places) if size > 1 else Solo()
        first, last = span(13, rank, size)
        return best(logits[:, first:last], 6, first, comm)

    with ThreadPoolExecutor(size) as pool:
        for found in pool.map(run, range(size)):
            lp = log_probabilities(found)
            want = logits.log_softmax(1)
            for row in (0, 5):
                order = sorted(range(13), key=lambda i, row=row: (-logits[row, i], i))[:6]
                assert found.ids[row].tolist() == order
                assert_close(lp[row], want[row, order].clamp(max=0), atol=1e-6)
            assert lp[2].isnan().all() and lp[3].isnan().all() and not (lp[1] > -torch.inf).any()
            assert found.ids[4, 0] == 12 and lp[4, 0] == 0 and (lp[4, 1:] == -torch.inf).all()


def test_the_amplitude_is_a_setting_unless_the_file_says_it(tmp_path):
    folder, reference = folder_of("kimi", tmp_path)
    other = dataclasses.replace(reference, config=dataclasses.replace(reference.config, rope_amplitude=1.3))
    features = features_of(reference, 11)
    assert_proposal(draft(network(folder, reference, amplitude=1.3), features, 5), wanted(other, features, 5))
    folder, reference = folder_of("attention_factor", tmp_path)
    assert_proposal(draft(network(folder, reference, amplitude=1.3), features, 5), wanted(reference, features, 5))


def test_a_window_bounds_what_every_layer_reads(tmp_path):
    folder, reference = folder_of("sliding", tmp_path)
    other = dataclasses.replace(reference, config=dataclasses.replace(reference.config, windows=(4, 9)))
    features = features_of(reference, 30)
    net = network(folder, reference, window=9)
    assert_proposal(draft(net, features, 5), wanted(other, features, 5))
    net._context[:, :, : 30 - 8] = torch.nan  # older rows are not even read
    assert_proposal(net.draft([Block(5, torch.arange(30))], K).proposals()[0], wanted(other, features, 5))


class Replayed:
    """Stands for a CUDA graph: computes again what was captured, into the same places."""

    graphs: graphs.Graphs
    calls: dict  # what reads a buffer, by its id

    def replay(self):
        entry = next(entry for entry in self.graphs._captured.values() if entry.graph is self)
        with torch.inference_mode():
            found = self.calls[id(entry.buffer)]()
            for place, values in zip(() if found is None else entry.found, () if found is None else found, strict=True):
                place.copy_(values)


@pytest.fixture
def no_cuda(monkeypatch):
    """torch.cuda as far as graphs need it."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for call in ("stream", "graph", "current_stream"):
        monkeypatch.setattr(torch.cuda, call, lambda *a, **k: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    monkeypatch.setattr(graphs, "SHORTEST", 16)
    calls = Replayed.calls = {}

    def noting(make):
        def noted(*kind):
            buffer, call = make(*kind)
            calls[id(buffer)] = call
            return buffer, call

        return noted

    for name in ("_drafting", "_absorbing"):
        monkeypatch.setattr(graphs.Graphs, name, noting(getattr(graphs.Graphs, name)))


@pytest.mark.parametrize("name", ["v1", "v2", "sliding_both_ways"])
def test_graphs_are_given_what_they_were_captured_for(name, tmp_path, no_cuda):
    """Shapes, padding and buffers; that a replay gives the bits of its kernels is tested on a GPU."""
    folder, reference = folder_of(name, tmp_path)
    net, other = network(folder, reference), network(folder, reference)
    tapped = torch.zeros(graphs.MOST, len(TAPS) * reference.config.hidden_size)
    made = Replayed.graphs = graphs.Graphs(net, K, tapped)
    made.capture_usual(4)
    usual = [*((1 << i, 16, "", 0) for i in range(3)), *((8 << i,) for i in range(7))]
    assert list(made._captured) == usual
    for lengths in ((11, 3, 0), (30,), (16, 1), (3,)):
        rows = list(torch.randperm(ROWS)[: sum(lengths)].split(list(lengths)))
        taken = torch.randperm(graphs.MOST)[: sum(lengths)]
        tapped.fill_(torch.nan)[taken] = torch.cat([torch.from_numpy(features_of(reference, n)) for n in lengths])
        positions = torch.cat([torch.arange(n) for n in lengths])
        assert made.absorb(*(values.tolist() for values in (taken, positions, torch.cat(rows))))
        for length, own in zip(lengths, rows, strict=True):
            absorb(other, features_of(reference, length), own)
        blocks = [Block(7 + i, own) for i, own in enumerate(rows)]
        for got, want in zip(made.draft(blocks).proposals(), other.draft(blocks, K).proposals(), strict=True):
            assert_close(got.lp, want.lp, atol=1e-5)
            assert torch.equal(got.ids, want.ids)
    longer = {(1, 32, "", 0)} if name == "v1" else set()  # the others have windows that are shorter
    assert made._captured.keys() == {*usual} | longer
    assert not made.absorb(*[[0] * (graphs.MOST + 1)] * 3)


@pytest.mark.parametrize("name", ["v1", "v2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_that_are_grown_where_candidates_are(name, shape, tmp_path, no_cuda):
    """By a graph and without one: bit for bit those of the same candidates, of each block's own budget and depth."""
    folder, reference = folder_of(name, tmp_path)
    net = network(folder, reference)
    absorb(net, features_of(reference, 30), torch.arange(30))
    made = Replayed.graphs = graphs.Graphs(net, K, torch.zeros(graphs.MOST, net.config.features))
    limits = [(19, 7), (0, 7), (5, 0), (12, 3), (1, 1)]
    blocks = [Block(7 + i, torch.arange(30 - 3 * i), *limit) for i, limit in enumerate(limits)]
    asked = net.gather(blocks, 8, 32)
    candidates = net.forward(asked, K)
    want = [
        grow(shape, proposal, block.root, block.budget, block.depth)
        for proposal, block in zip(candidates.proposals(), blocks, strict=False)
    ]
    for words in (made.draft(blocks, shape, 20), frames.draft(net, asked, K, shape, 20)[: len(blocks)]):
        size, fetch = frames.pack(words)
        got = frames.unpack(size, fetch())
        assert size == (5, 20) and [tree.tree for tree in got] == [tree.tree for tree in want]
        assert [list(tree.scores) for tree in got] == [pytest.approx(list(tree.scores), abs=1e-6) for tree in want]
    with pytest.raises(ValueError, match=r"trees of shape \(5, 19\) in"):
        frames.unpack((5, 19), fetch())


class Written:
    """A network that only notes which features lie in which row, and at which position."""

    device = torch.device("cpu")

    def __init__(self):
        self.rows, self.calls = {}, 0

    def absorb(self, features, positions, rows):
        assert len(set(rows.tolist())) == len(rows) == len(features) == len(positions)  # nothing is written twice
        self.rows |= dict(
            zip(rows.tolist(), zip(features[:, 0].tolist(), positions.tolist(), strict=True), strict=True)
        )
        self.calls += 1


@settings(deadline=None, derandomize=True, max_examples=100)
@given(st.lists(st.one_of(st.none(), st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=30)), max_size=40))
def test_what_waits_is_absorbed_as_if_it_had_not(steps):
    """Rows in any order, written again and again by other texts, at times more than there is room for; of a forward's
    rows every other one is taken, and all are overwritten then. None: a draft comes."""
    net, want, count = Written(), {}, 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backlog, "MOST", 40)
        waiting = Backlog(net, 2, torch.float32)
        for rows in [*steps, None]:
            if rows is None:
                waiting.flush()
                assert net.rows == want
                continue
            features = torch.arange(count, count + 2 * len(rows) + 1, dtype=torch.float32)[:, None].repeat(1, 2)
            taken, positions = range(1, 2 * len(rows), 2), [7 * row for row in rows]
            want |= {row: (float(count + at), 7 * row) for row, at in zip(rows, taken, strict=True)}
            waiting.add(features, taken, positions, rows)
            features.fill_(torch.nan)
            count += 100


def test_what_waits_is_absorbed_together_and_is_never_much():
    net = Written()
    waiting = Backlog(net, 2, torch.float32)
    for i in range(3 * backlog.MOST):
        waiting.add(torch.zeros(1, 2), [0], [i], [i])
    assert net.calls == 2 and len(net.rows) == 2 * backlog.MOST
    waiting.flush()
    assert net.calls == 3 and len(net.rows) == 3 * backlog.MOST
