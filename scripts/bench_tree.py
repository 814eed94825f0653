"""Measure how long draft trees take: built on the GPU, and by a heap on the CPU.

    python scripts/bench_tree.py [--quick] [--json]

Each way starts with the drafter's candidates on the GPU, and ends when the trees are lists on the host and are on the
GPU as the verify forward wants them: tokens, positions, ancestor bits. What has to be copied for that is counted.

    gpu    upload roots and limits, kdtp_tree_build, download tokens and parents
    heap   download candidates, Python's heapq as public engines use it, one request at a time, upload the trees
    spec   the same with kdtp.spec.tree.build, whose trees are the GPU's bit for bit, which is checked

The ways take turns, so that a busy machine disturbs all alike. "kernel" is the build alone, in a CUDA graph of many.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.gpu_time import missing  # noqa: E402
from scripts.measure import machine, repeat, spread, table  # noqa: E402
from scripts.tree_ways import CANDIDATES, START, Block, Case, OnCpu, OnGpu, by_heap, by_spec  # noqa: E402

VOCAB = 163_840
STEEPNESS = np.linspace(1.0, 3.0, 9)


@dataclass(frozen=True)
class Scope:
    """How much is run. runs: at least and at most, of each way; seconds: after which no more are begun."""

    budgets: tuple[int, ...]
    seqs: tuple[int, ...]
    lengths: tuple[int, ...]
    runs: tuple[int, int]
    seconds: float


FULL = Scope((16, 32, 64, 256, 1024), (1, 4, 16, 64), (7, 15), (5, 200), 3.0)
QUICK = Scope((16, 64), (1, 4), (7,), (3, 5), 0.2)


def candidates(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """lp and ids [seqs, L, K] as of a drafter: probabilities fall with a power of the rank, steeply at some depths."""
    rng = np.random.default_rng(case.length * 10_000 + case.budget)
    rank = np.log(np.arange(1, VOCAB + 1))
    chosen = rng.integers(0, len(STEEPNESS), (case.seqs, case.length))
    rows = np.array([-steep * rank - np.log(np.exp(-steep * rank).sum()) for steep in STEEPNESS])[:, : case.width]
    # Hardly any equal sums, for which the heap has another rule.
    lp = rows[chosen] - np.sort(rng.uniform(0, 1e-3, (*chosen.shape, case.width)))
    ids = np.argsort(rng.random((case.seqs, case.length, 1000)))[:, :, : case.width]
    return lp.astype(np.float32), ids


def fill(case: Case, block: Block) -> None:
    """Put what every way starts with where it belongs."""
    block.host["lp"][:], block.host["ids"][:] = candidates(case)
    for name, values in (("roots", 7), ("budgets", case.budget), ("depths", case.length), ("starts", START)):
        block.host[name][:] = values
    block.upload(CANDIDATES)
    torch.cuda.synchronize()


def measure_case(case: Case, scope: Scope) -> dict[str, Any]:
    """Times of one case, in microseconds. Raises RuntimeError if the GPU's trees are not spec's."""
    block = Block(case)
    fill(case, block)
    gpu, heap, spec = OnGpu(case, block), OnCpu(block, by_heap), OnCpu(block, by_spec)
    ways = {"gpu": gpu, "heap": heap, "spec": spec}
    built, same = gpu.run(), spec.run()
    if built != same:
        raise RuntimeError(f"{case}: the GPU's trees are not those of kdtp.spec.tree.build")
    samples: dict[str, list[float]] = {name: [] for name in ways}
    least, most = scope.runs
    started = time.perf_counter()
    for i in range(most):
        if i >= least and time.perf_counter() - started > scope.seconds:
            break
        for name, way in ways.items():
            samples[name] += repeat(way.run, 1)
    samples |= {"kernel": gpu.kernel(most), "heap alone": heap.building, "spec alone": spec.building}
    nodes = sum(len(tokens) - 1 for tokens, _ in built) / case.seqs
    return {**asdict(case), "k": case.width, "nodes": nodes, **{name: spread(s) for name, s in samples.items()}}


def measure(scope: Scope) -> dict[str, Any]:
    """All cases, as plain values."""
    cases = [Case(*values) for values in itertools.product(scope.lengths, scope.seqs, scope.budgets)]
    about = machine() | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    return {"machine": about, "unit": "microseconds", "cases": [measure_case(case, scope) for case in cases]}


def show(result: Mapping[str, Any]) -> str:
    """The result as a table of medians."""
    header = ("L", "seqs", "budget", "nodes", "kernel", "gpu", "heap", "alone", "spec", "alone", "heap/gpu", "runs")
    times = ("kernel", "gpu", "heap", "heap alone", "spec", "spec alone")
    rows = [
        [
            *(case["length"], case["seqs"], case["budget"], f"{case['nodes']:.0f}"),
            *(f"{case[name]['median']:.1f}" for name in times),
            *(f"{case['heap']['median'] / case['gpu']['median']:.1f}", case["gpu"]["n"]),
        ]
        for case in result["cases"]
    ]
    about = "{gpu}; {cpu}, {cores} cores, load {load}; medians, microseconds".format(**result["machine"])
    return f"{about}\n{table(header, rows)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure how long draft trees take, on the GPU and on the CPU.")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    chosen = parser.parse_args(arguments)
    if lack := missing():
        sys.exit(f"bench_tree: {lack}")
    result = measure(QUICK if chosen.quick else FULL)
    print(json.dumps(result) if chosen.json else show(result))


if __name__ == "__main__":
    main()
