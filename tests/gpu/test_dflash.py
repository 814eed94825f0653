"""DFlash on a GPU, in CUDA graphs and kernel by kernel: DDTree == chain == AR, and drafts are the CPU's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kdtp.draft.dflash import config as configs
from kdtp.draft.dflash import frames
from kdtp.draft.dflash.graphs import MOST, SHORTEST, Graphs
from kdtp.draft.dflash.network import Block, DFlash, Drafted, TargetPart
from kdtp.engine.request import Request
from kdtp.model.comm import Solo
from kdtp.model.weights import kdtr
from kdtp.spec.tree import grow
from kdtp.types import SHAPES, SamplingParams, power
from reference.config import to_metadata
from reference.weights import random_weights
from scripts import gen_model_ref
from tests.dflash import BASES, Loaded, accepted_alike, drafter_folder, drafts, grown_alike, random_text
from tests.gpu.conftest import missing
from tests.paths import TINY, V3

pytestmark = pytest.mark.timeout(300)
# As model_tiny, with few tokens, so that random drafts are accepted now and then.
SMALL = dataclasses.replace(gen_model_ref.TINY.config, vocab_size=53, num_hidden_layers=3, max_position_embeddings=4000)
WAYS = [(dtype, graphs) for dtype in ("float32", "bfloat16") for graphs in (True, False)]


def way_id(way):
    return f"{way[0]}-{'graphs' if way[1] else 'eager'}"


def write_small(folder):
    arrays = random_weights(SMALL, np.random.PCG64(0))
    kdtr.write(folder / "m.kdtr", {"format": "kdtp-model", **to_metadata(SMALL)}, arrays)
    return folder / "m.kdtr"


@pytest.fixture(scope="module", params=WAYS, ids=way_id)
def loaded(request, tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("small")
    dtype, graphs = request.param
    made = Loaded(folder, write_small(folder), device="cuda", dtype=dtype, graphs=graphs, kv_tokens=1 << 14)
    yield made
    made.close()


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cpu")
    made = Loaded(folder, write_small(folder), kv_tokens=1 << 14)
    yield made
    made.close()


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_any_draft_gives_the_text_and_the_bits_of_plain_decoding(loaded, version, temperature, capsys):
    params = SamplingParams(max_tokens=24, temperature=temperature, seed=3)
    prompts = [random_text(i, size) for i, size in enumerate((1, 20, 90, 200))]
    plain = loaded.harness().run(prompts, params)
    ways = (
        {},
        {"trees": "host"},
        {"shape": "chain"},
        {"shape": "seeded"},
        {"budget": 7},
        {"window": 16},
        {"budget": 0},
    )
    drafters = (loaded.settings(version, **changes) for changes in ways)
    accepted = accepted_alike(loaded, plain, prompts, params, drafters, prefill_chunk=64, max_batch=3)
    with capsys.disabled():
        print(f"{version} T={temperature}: {accepted} draft tokens accepted")
    assert accepted > 3, accepted


@pytest.mark.parametrize("name", ["dflash", "dflash+ngram"])
def test_widths_by_measured_cost_give_the_text_and_the_bits_of_plain_decoding(loaded, name):
    params = SamplingParams(max_tokens=60, temperature=0.8, seed=3)
    prompts = [random_text(i, size) for i, size in enumerate((1, 20, 30))]
    prompts[2] *= 3
    plain = loaded.harness().run(prompts, params)
    drafter = loaded.settings("v2", name=name, width="auto")
    done = loaded.harness(drafter).run(prompts, params, drafter)
    for got, want in zip(done, plain, strict=True):
        assert got.tokens == want.tokens and got.logits.tobytes() == want.logits.tobytes()


@pytest.mark.parametrize("shape", ["tree", "chain", "seeded"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_trees_are_those_that_the_host_grows(loaded, version, shape):
    """Of one sequence and of many at once, each with a budget and a depth of its own, down to nothing."""
    drafter = loaded.settings(version, shape=shape, budget=64)
    harness = loaded.harness(drafter)
    sizes = list(zip((None, 3, 0, 24, 64, 1, 17, 40), (14, 9, 12, 3, 20, 8, 2, 30), strict=True))
    batch = [
        Request(i, random_text(i, 20 + 9 * i), SamplingParams(max_tokens=size), budget=budget)
        for i, (budget, size) in enumerate(sizes)
    ]
    grown = grown_alike(harness, drafter, batch) + grown_alike(harness, drafter, [requests(40)[2]])
    nodes = {len(made.tree) - 1 for _, made in grown}
    assert {1, 3, 64} <= nodes if shape != "chain" else max(nodes) == 4, nodes


def requests(size=9):
    prompts = [random_text(i, length) for i, length in enumerate((9, 70, 131))]
    return [Request(i, prompt, SamplingParams(max_tokens=size)) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_drafts_are_the_cpus(loaded, on_cpu, version, capsys):
    """In float32; in bfloat16 roughly, where the texts agree."""
    theirs, ours = on_cpu.settings(version), loaded.settings(version)
    want, _ = drafts(on_cpu.harness(theirs), theirs, [requests()])
    found, _ = drafts(loaded.harness(ours), ours, [requests()])
    exact = loaded.changes["dtype"] == "float32"
    shared = [text for text in want if text in found]
    assert len(shared) == len(want) if exact else len(shared) >= 3
    differences = []
    for text in shared:
        lp = [by_id(proposals[text]) for proposals in (want, found)]
        both = lp[0].isfinite() & lp[1].isfinite()
        differences.append((lp[0] - lp[1])[both].abs())
        if exact:
            assert torch.equal(want[text].ids, found[text].ids)
    difference = torch.cat(differences)
    with capsys.disabled():
        print(f"{version} {loaded.changes['dtype']}: lp differ by {difference.max():.3e}, mean {difference.mean():.3e}")
    assert difference.max() <= 1e-4 if exact else difference.mean() <= 0.2


def by_id(proposal):
    """Log-probabilities of the first depth by token id, [V]; -inf for those that are not candidates."""
    lp = proposal.lp[0] if proposal.lp.dim() == 2 else proposal.lp[0, 0]
    return torch.full((SMALL.vocab_size,), -torch.inf).scatter(0, proposal.ids[0], lp)


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_drafts_depend_on_the_text_alone(loaded, version):
    """Chunks, batches, a prefix that another request left, preemption: as alone. A longer text takes another graph."""
    drafter = loaded.settings(version)
    harness = loaded.harness(drafter)
    prompts = [random_text(0, 70) + random_text(i, 52) for i in (1, 2, 3)] + [random_text(9, 1040)]

    def batch(size=12):
        return [Request(i, p, SamplingParams(max_tokens=size)) for i, p in enumerate(prompts)]

    alone, _ = drafts(harness, drafter, [[r] for r in batch(40)], prefix_cache=False)
    runs = {
        "chunks": drafts(harness, drafter, [batch()], prefill_chunk=16, prefix_cache=False),
        "prefix": drafts(harness, drafter, [[r] for r in batch()]),
        "preempted": drafts(harness, drafter, [batch(40)[:3]], kv_tokens=4 * 64),
    }
    tolerance = 1e-4 if loaded.changes["dtype"] == "float32" else 0.3
    for name, (found, coordinator) in runs.items():
        shared = found.keys() & alone.keys()
        assert len(shared) >= 10, name
        assert coordinator.totals()["preemptions"] > 0 or name != "preempted"
        for text in shared:
            lp = [by_id(proposals[text]) for proposals in (alone, found)]
            both = lp[0].isfinite() & lp[1].isfinite()
            assert both.any() and float((lp[0] - lp[1])[both].abs().max()) <= tolerance, name


@pytest.mark.parametrize("path", [TINY, V3], ids=lambda path: path.stem)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("version", ["v1", "v2"])
def test_bits_of_the_golden_models(path, graphs, version, tmp_path):
    made = Loaded(tmp_path, path, device="cuda", graphs=graphs)
    golden = made.harness().plan.golden
    params = SamplingParams(max_tokens=len(golden.tokens))
    (plain,) = made.harness().run([golden.prompt], params)
    assert plain.tokens == list(golden.tokens)
    for shape in ("tree", "chain"):
        drafter = dataclasses.replace(made.settings(version, topk=60), shape=shape)
        (done,) = made.harness(drafter).run([golden.prompt], params, drafter)
        assert done.tokens == plain.tokens and done.logits.tobytes() == plain.logits.tobytes(), shape
        assert done.usage.drafted_by_depth
    made.close()


def test_features_are_the_same_in_graphs(tmp_path):
    """What the drafter reads of a forward: bit for bit, whether it was a graph or not, and of the last layer too."""
    made = [Loaded(tmp_path, write_small(tmp_path), device="cuda", graphs=graphs) for graphs in (True, False)]
    found = []
    for each in made:
        drafter = each.settings("v1")
        found.append(drafts(each.harness(drafter), drafter, [requests()])[0])
        each.close()
    assert found[0].keys() == found[1].keys()
    for text, proposal in found[0].items():
        assert_near(proposal.lp, found[1][text].lp)
        assert torch.equal(proposal.ids, found[1][text].ids)


def assert_near(found, want):
    assert float((found - want).abs().max()) <= 1e-4


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_a_graph_absorbs_are_those_of_its_kernels(cuda, version, dtype, tmp_path):
    """Of any number, in any order, after larger graphs and smaller ones; no other row of the context is touched."""
    folder = drafter_folder(tmp_path, BASES[version], SMALL)
    random = torch.Generator(cuda).manual_seed(1)
    embed = torch.randn(SMALL.vocab_size, SMALL.hidden_size, generator=random, device=cuda).to(dtype)
    network = DFlash(folder, configs.read(folder), TargetPart(embed, embed, 0), Solo(), 1024, poison=True)
    features = torch.randn(MOST, network.config.features, generator=random, device=cuda).to(dtype)
    graphs, empty = Graphs(network, 4, features), network._context.clone()
    for count in (512, 1, 257, 256, 8, 9, 511, 3):
        taken, positions, rows = (torch.randperm(n)[:count] for n in (MOST, 4000, 1024))
        network._context.copy_(empty)
        assert graphs.absorb(taken.tolist(), positions.tolist(), rows.tolist())
        found = network._context.clone()
        network._context.copy_(empty)
        network.absorb(features[taken.cuda()], positions.cuda(), rows.cuda())
        assert not network._context[:, :, rows.cuda()].isnan().any()
        for mine, theirs in zip(found[:, :, :1025], network._context[:, :, :1025], strict=True):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)), count
    assert not graphs.absorb([0] * 513, [0] * 513, [0] * 513)


@pytest.mark.parametrize("version", ["v1", "v2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_of_a_graph_are_those_of_its_candidates(cuda, version, shape, tmp_path):
    """Bit for bit, of each block's own budget and depth, and whatever was drafted before in the same graph."""
    folder = drafter_folder(tmp_path, BASES[version], SMALL)
    random = torch.Generator(cuda).manual_seed(1)
    embed = torch.randn(SMALL.vocab_size, SMALL.hidden_size, generator=random, device=cuda)
    network = DFlash(folder, configs.read(folder), TargetPart(embed, embed.t(), 0), Solo(), 1024)
    features = torch.randn(MOST, network.config.features, generator=random, device=cuda)
    rows = torch.arange(MOST)
    network.absorb(features, rows.cuda(), rows.cuda())
    graphs = Graphs(network, 8, features)
    limits = [(19, 7), (0, 7), (5, 0), (12, 3), (1, 1)]
    for seed, many in enumerate((5, 3, 5, 1, 4)):
        starts = torch.randint(MOST, (many,), generator=torch.Generator().manual_seed(seed)).tolist()
        blocks = [Block(7 + i, rows[:start], *limits[i]) for i, start in enumerate(starts)]
        candidates = network.forward(network.gather(blocks, power(many), SHORTEST).cuda(), 8)
        lp, ids = candidates.lp.cpu(), candidates.ids.cpu()
        want = [
            grow(shape, proposal, block.root, block.budget, block.depth)
            for proposal, block in zip(Drafted(lp, ids).proposals(), blocks, strict=False)
        ]
        size, fetch = frames.pack(graphs.draft(blocks, shape, 20))
        got = frames.unpack(size, fetch())
        assert [tree.tree for tree in got] == [tree.tree for tree in want]
        assert [list(tree.scores) for tree in got] == [list(tree.scores) for tree in want]
