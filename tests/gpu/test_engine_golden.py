"""Both golden models through the CUDA kernels, as graphs and one by one: all tokens, logits within 5e-5, and a row's
bits its own.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kdtp.config import DrafterConfig
from kdtp.types import SamplingParams
from tests.gpu.conftest import missing
from tests.harness import NONE, Harness
from tests.paths import TINY, V3

TOLERANCE = 5e-5


WAYS = [(path, graphs) for path in (TINY, V3) for graphs in (True, False)]


def way_id(way):
    return f"{way[0].stem}-{'graphs' if way[1] else 'eager'}"


@pytest.fixture(scope="module", params=WAYS, ids=way_id)
def ranks(request):
    path, graphs = request.param
    if reason := missing():
        pytest.skip(f"{path.stem}: {reason}")
    harness = Harness(path, device="cuda", graphs=graphs)
    yield harness
    harness.close()


def oracle(**changes) -> DrafterConfig:
    return DrafterConfig("oracle", **changes)


METHODS = {
    "AR": NONE,
    "chain": oracle(shape="chain", budget=7),
    "tree": oracle(budget=16),
    "partial tree": oracle(budget=24, hit=(0.8, 0.6), rank=3, seed=1),
    "wrong tree": oracle(budget=9, hit=(0.0,)),
    "ngram": DrafterConfig("ngram"),
}


def name_of(ranks):
    return way_id((Path(ranks.config.model), ranks.config.graphs))


def test_every_method_gives_the_golden_tokens(ranks, capsys):
    golden = ranks.plan.golden
    known = {golden.prompt: golden.tokens}
    plain = None
    for method, drafter in METHODS.items():
        (done,) = ranks.run([golden.prompt], SamplingParams(max_tokens=len(golden.tokens)), drafter, known)
        assert done.tokens == list(golden.tokens), method
        difference = np.abs(done.logits - golden.logits).max()
        with capsys.disabled():
            print(f"{name_of(ranks)} {method}: max_abs_logit_diff={difference:.3e}")
        assert difference <= TOLERANCE, (method, difference)
        plain = plain if plain is not None else done.logits
        assert done.logits.tobytes() == plain.tobytes(), method
        if method == "tree":
            assert (done.usage.rounds, done.usage.committed) == (len(golden.tokens) // 8, len(golden.tokens))


def test_batches_and_chunks_change_no_bit(ranks):
    golden = ranks.plan.golden
    vocab = ranks.plan.model.vocab_size
    rng = np.random.default_rng(2)
    prompts = [golden.prompt] + [tuple(map(int, rng.integers(vocab, size=n))) for n in (1, 7, 64, 65, 90)]
    params = SamplingParams(max_tokens=12)
    alone = [ranks.run([prompt], params)[0] for prompt in prompts]
    known = {prompt: tuple(done.tokens) for prompt, done in zip(prompts, alone, strict=True)}
    for chunk in (5, 64, 256):
        drafter = oracle(budget=12, hit=(0.7,), rank=2, seed=chunk)
        together = ranks.run(prompts, params, drafter, known, prefill_chunk=chunk)
        for one, other in zip(alone, together, strict=True):
            assert one.tokens == other.tokens
            assert one.logits.tobytes() == other.logits.tobytes()


def test_sampled_text_is_the_same_with_any_draft(ranks):
    golden = ranks.plan.golden
    params = SamplingParams(max_tokens=16, temperature=0.9, top_p=0.95, seed=5)
    (plain,) = ranks.run([golden.prompt], params)
    known = {golden.prompt: tuple(plain.tokens)}
    (tree,) = ranks.run([golden.prompt], params, oracle(hit=(0.8,), rank=2), known)
    assert tree.tokens == plain.tokens


@pytest.mark.parametrize("path", [TINY, V3], ids=lambda path: path.stem)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_graphs_change_no_bit(path, dtype):
    done = []
    for graphs in (True, False):
        harness = Harness(path, device="cuda", dtype=dtype, graphs=graphs)
        golden = harness.plan.golden
        prompts = [golden.prompt, golden.prompt[:3], golden.prompt * 2]
        known = dict.fromkeys(prompts, golden.tokens)  # mostly wrong
        done.append(harness.run(prompts, SamplingParams(max_tokens=24), oracle(hit=(0.7,), rank=2), known))
        harness.close()
    for graph, eager in zip(*done, strict=True):
        assert graph.tokens == eager.tokens
        assert graph.logits.tobytes() == eager.logits.tobytes()


@pytest.mark.parametrize("way", WAYS, ids=way_id)
def test_bfloat16_tree_equals_plain_decoding(way, capsys):
    path, graphs = way
    harness = Harness(path, device="cuda", dtype="bfloat16", graphs=graphs)
    golden = harness.plan.golden
    params = SamplingParams(max_tokens=len(golden.tokens))
    (plain,) = harness.run([golden.prompt], params)
    known = {golden.prompt: tuple(plain.tokens)}
    (tree,) = harness.run([golden.prompt], params, oracle(budget=16), known)
    harness.close()
    assert tree.tokens == plain.tokens
    assert tree.logits.tobytes() == plain.logits.tobytes()
    same = sum(a == b for a, b in zip(plain.tokens, golden.tokens, strict=True))
    with capsys.disabled():
        print(f"{way_id(way)} bfloat16: {same}/{len(golden.tokens)} golden tokens")
