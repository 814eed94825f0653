"""Measure how long draft trees take: built on the GPU, and by a heap on the CPU.

    python scripts/bench_tree.py [--quick] [--json] [--dry-run]

Each way starts with the drafter's candidates on the GPU, and ends when the trees are lists on the host and are on the
GPU as the verify forward wants them: tokens, positions, ancestor bits. What has to be copied for that is counted.

    gpu    upload roots and limits, kdtp_tree_build, download tokens, parents and scores
    heap   download candidates, Python's heapq as public engines use it, one request at a time, upload the trees
    spec   the same with kdtp.spec.tree.build, whose trees are the GPU's bit for bit, which is checked

The ways take turns, so that a busy machine disturbs all alike. "kernel" is the build alone, in a CUDA graph of many.

The whole sweep has a time, which is shared out: what a point leaves over goes to those behind it, and one whose heaps
take long has fewer runs. "runs" says how many each way had; a first turn is not counted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.dry_run import dry_run  # noqa: E402
from scripts.gpu_time import missing  # noqa: E402
from scripts.measure import machine, spread, table  # noqa: E402
from scripts.tree_ways import CANDIDATES, START, Block, Case, OnCpu, OnGpu, by_heap, by_spec  # noqa: E402

VOCAB = 163_840
STEEPNESS = np.linspace(1.0, 3.0, 9)


@dataclass(frozen=True)
class Scope:
    """How much is run. runs: of each point, at least and at most; seconds: for all points, but for the least runs."""

    budgets: tuple[int, ...]
    seqs: tuple[int, ...]
    lengths: tuple[int, ...]
    runs: tuple[int, int]
    seconds: float


FULL = Scope((16, 32, 64, 256, 1024), (1, 4, 16, 64), (7, 15), (3, 200), 60.0)
QUICK = Scope((16, 64), (1, 4), (7,), (3, 5), 4.0)


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
    block.wait()


def take_turns(ways: Iterable[Callable[[], object]], runs: tuple[int, int], until: float) -> list[list[float]]:
    """Microseconds of each way by turn; turns: runs[0] at least, runs[1] at most, between them until the clock says."""
    least, most = runs
    turns: list[list[float]] = []
    while len(turns) < least or (len(turns) < most and time.perf_counter() < until):
        turns.append([once(way) for way in ways])
    return [list(samples) for samples in zip(*turns, strict=True)]


def once(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    started = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - started)


def measure_case(case: Case, runs: tuple[int, int], until: float) -> dict[str, Any]:
    """Times of one case, in microseconds. Raises RuntimeError if the GPU's trees are not spec's."""
    block = Block(case, torch.device("cuda"))
    fill(case, block)
    gpu, heap, spec = OnGpu(case, block), OnCpu(block, by_heap), OnCpu(block, by_spec)
    built, _, same = gpu.run(), heap.run(), spec.run()
    if built != same:
        raise RuntimeError(f"{case}: the GPU's trees are not those of kdtp.spec.tree.build")
    heap.building.clear()
    spec.building.clear()
    kernel = gpu.kernel(runs[1])
    whole = take_turns((gpu.run, heap.run, spec.run), runs, until)
    samples = dict(zip(("gpu", "heap", "spec"), whole, strict=True))
    samples |= {"kernel": kernel, "heap alone": heap.building, "spec alone": spec.building}
    nodes = sum(len(tokens) - 1 for tokens, _ in built) / case.seqs
    return {**asdict(case), "k": case.width, "nodes": nodes, **{name: spread(s) for name, s in samples.items()}}


def sweep(scope: Scope) -> list[Case]:
    """All cases."""
    return [Case(*values) for values in itertools.product(scope.lengths, scope.seqs, scope.budgets)]


def measure(scope: Scope) -> dict[str, Any]:
    """All cases, as plain values."""
    about = machine() | {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    started = time.perf_counter()
    cases, found = sweep(scope), []
    for i, case in enumerate(cases):
        now = time.perf_counter()
        found.append(measure_case(case, scope.runs, now + (started + scope.seconds - now) / (len(cases) - i)))
    took = {"least": scope.runs[0], "seconds": scope.seconds, "took": time.perf_counter() - started}
    return {"machine": about, "unit": "microseconds", **took, "cases": found}


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
    time_spent = "{seconds:.0f} s shared out, at least {least} runs of each point; took {took:.0f} s".format(**result)
    return f"{about}\n{time_spent}\n{table(header, rows)}"


def rehearse(scope: Scope) -> str:
    """Every case once on the CPU: the trees are built there, the GPU's struct is made, and nothing is launched."""
    rows = []
    with dry_run() as paper:
        for case in sweep(scope):
            block = Block(case, torch.device("cpu"))
            fill(case, block)
            OnGpu(case, block).run()
            heap, spec = OnCpu(block, by_heap), OnCpu(block, by_spec)
            rows.append([case.length, case.seqs, case.budget, once(heap.run), once(spec.run)])
    least = (1 + scope.runs[0]) * sum(row[3] + row[4] for row in rows) / 1e6
    checked = "checked by the library" if paper.checks else "not checked: the library is not built"
    lines = [table(("L", "seqs", "budget", "heap", "spec"), rows), "microseconds on this CPU, of one run each"]
    lines.append(f"{len(paper.calls)} calls, {checked}; the CPU's part of the least runs would take {least:.0f} s here")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure how long draft trees take, on the GPU and on the CPU.")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--dry-run", action="store_true", help="build on the CPU alone, and launch nothing")
    chosen = parser.parse_args(arguments)
    scope = QUICK if chosen.quick else FULL
    if chosen.dry_run:
        print(rehearse(scope))
        return
    if lack := missing():
        sys.exit(f"bench_tree: {lack}")
    result = measure(scope)
    print(json.dumps(result) if chosen.json else show(result))


if __name__ == "__main__":
    main()
