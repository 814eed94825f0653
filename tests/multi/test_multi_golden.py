"""Golden models on several GPUs, a process each: the tokens of one rank, by plain decoding, chains and trees, in CUDA
graphs and kernel by kernel, with small sums pushed and with all of them by NCCL.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from kdtp.config import DrafterConfig
from kdtp.engine.link import ZmqLink
from kdtp.types import SamplingParams
from tests import hf_cases, parted
from tests.dflash import Loaded, random_text
from tests.harness import NONE, Done, Harness
from tests.hf_golden import Golden
from tests.multi.conftest import DEVICE, need_legal
from tests.paths import TINY, V3

pytestmark = pytest.mark.timeout(120)
TOLERANCE = 5e-5
TREE = DrafterConfig("oracle", budget=16)
METHODS = {
    "AR": NONE,
    "chain": DrafterConfig("oracle", shape="chain", budget=7),
    "tree": TREE,
    "partial tree": DrafterConfig("oracle", budget=24, hit=(0.8, 0.6), rank=3, seed=1),
    "ngram": DrafterConfig("ngram"),
}


class Way(NamedTuple):
    """How an engine is run; sums: see tests/odd_rank.py."""

    model: Path
    dtype: str
    graphs: bool
    sums: str

    def __str__(self) -> str:
        return f"{self.model.stem}-{self.dtype}-{'graphs' if self.graphs else 'eager'}-{self.sums}"


WAYS = [
    Way(TINY, "float32", True, "probe"),
    Way(TINY, "float32", True, "base"),
    Way(TINY, "float32", False, "push"),
    Way(V3, "float32", True, "probe"),
    Way(V3, "float32", False, "base"),
    Way(TINY, "bfloat16", True, "push"),
    Way(V3, "bfloat16", True, "base"),
]


@pytest.fixture(scope="module", params=WAYS, ids=str)
def ranks(request: pytest.FixtureRequest, gpus: int) -> Iterator[tuple[Way, Harness]]:
    """Loaded ranks."""
    way: Way = request.param
    need_legal(way.model, gpus)
    worker = parted.worker(way.sums)
    harness = Harness(way.model, gpus, worker, device=DEVICE, dtype=way.dtype, graphs=way.graphs)
    yield way, harness
    harness.close()


def all_ways(harness: Harness, tokens: tuple[int, ...]) -> dict[str, Done]:
    """The golden prompt by every method; drafts are of these tokens."""
    golden = harness.plan.golden
    assert golden is not None
    params = SamplingParams(max_tokens=len(golden.tokens))
    known = {golden.prompt: tokens}
    return {name: harness.run([golden.prompt], params, drafter, known)[0] for name, drafter in METHODS.items()}


def test_every_method_gives_the_golden_tokens(
    ranks: tuple[Way, Harness], gpus: int, capsys: pytest.CaptureFixture[str]
) -> None:
    way, harness = ranks
    golden = harness.plan.golden
    assert golden is not None
    assert len({link.hello.pid for link in harness.links if isinstance(link, ZmqLink) and link.hello}) == gpus
    (plain,) = harness.run([golden.prompt], SamplingParams(max_tokens=len(golden.tokens)))
    same = sum(a == b for a, b in zip(plain.tokens, golden.tokens, strict=True))
    difference = float(np.abs(plain.logits - golden.logits)[: max(1, same)].max())
    with capsys.disabled():
        print(f"\n{gpus} GPUs {way}: {same}/{len(golden.tokens)} golden, max_abs_logit_diff={difference:.3e}")
    if way.dtype == "float32":
        assert plain.tokens == list(golden.tokens)
        assert difference <= TOLERANCE
    done = all_ways(harness, tuple(plain.tokens))
    for method, other in done.items():
        assert other.tokens == plain.tokens, method
        assert other.logits.tobytes() == plain.logits.tobytes(), method
    assert done["tree"].usage.rounds == len(golden.tokens) // 8
    assert harness.fleet.desync_checks == harness.fleet.step


def test_batches_and_chunks_change_no_bit(ranks: tuple[Way, Harness]) -> None:
    _, harness = ranks
    vocab = harness.plan.model.vocab_size
    rng = np.random.default_rng(2)
    prompts = [tuple(map(int, rng.integers(vocab, size=n))) for n in (1, 7, 65, 150)]
    params = [SamplingParams(max_tokens=10), SamplingParams(max_tokens=10, temperature=0.8, top_p=0.95, seed=3)] * 2
    alone = [harness.run([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    known = {prompt: tuple(done.tokens) for prompt, done in zip(prompts, alone, strict=True)}
    for chunk in (64, 256):
        drafter = DrafterConfig("oracle", budget=12, hit=(0.7,), rank=2, seed=chunk)
        together = harness.run(prompts, params, drafter, known, prefill_chunk=chunk)
        for one, other in zip(alone, together, strict=True):
            assert one.tokens == other.tokens
            assert one.logits.tobytes() == other.logits.tobytes()


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_a_network_drafts_on_all_ranks(
    version: str, gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any tree of its drafts gives the bits of plain decoding."""
    need_legal(TINY, gpus, "bfloat16")
    loaded = Loaded(tmp_path, TINY, tp=gpus, device=DEVICE, dtype="bfloat16", kv_tokens=1 << 13)
    prompts, params = [random_text(i, size) for i, size in enumerate((1, 20, 90))], SamplingParams(max_tokens=16)
    try:
        drafter = loaded.settings(version)
        harness = loaded.harness(drafter)
        plain = harness.run(prompts, params)
        trees = harness.run(prompts, params, drafter)
    finally:
        loaded.close()
    for tree, alone in zip(trees, plain, strict=True):
        assert tree.tokens == alone.tokens and tree.logits.tobytes() == alone.logits.tobytes()
        assert sum(tree.usage.drafted_by_depth) > 0
    with capsys.disabled():
        accepted = sum(sum(tree.usage.accepted_by_depth) for tree in trees)
        print(f"\n{gpus} GPUs, DFlash {version}: {accepted} draft tokens accepted")


@pytest.mark.parametrize("name", ["k25"])
def test_a_published_checkpoint_with_int4_experts(
    name: str, gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Kept in INT4; trees are plain decoding, and the logits those of transformers as near as bfloat16 is."""
    path, golden = hf_cases.write(name, tmp_path), Golden(name)
    need_legal(path, gpus, "bfloat16")
    harness = Harness(path, gpus, device=DEVICE, dtype="bfloat16")
    prompts = [tuple(prompt.tolist()) for prompt in golden.prompts]
    params = SamplingParams(max_tokens=len(golden.tokens[0]), ignore_eos=True)
    try:
        plain = harness.run(prompts, params)
        known = {prompt: tuple(done.tokens) for prompt, done in zip(prompts, plain, strict=True)}
        trees = harness.run(prompts, params, DrafterConfig("oracle", budget=20, hit=(0.9, 0.7), rank=2), known)
    finally:
        harness.close()
    errors = []
    for tree, alone, prompt, logits in zip(trees, plain, prompts, golden.logits, strict=True):
        assert tree.tokens == alone.tokens and tree.logits.tobytes() == alone.logits.tobytes()
        assert tree.usage.rounds < alone.usage.rounds
        first = logits[len(prompt) - 1]  # later ones belong to the text that came
        errors.append(float(np.linalg.norm(alone.logits[0] - first) / np.linalg.norm(first)))
    with capsys.disabled():
        print(f"\n{gpus} GPUs {name}: relative errors of the first logits {errors}")
    assert np.median(errors) < 0.06
