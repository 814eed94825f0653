"""Measure a step of one TP=8 rank of Kimi K2.6 on one GPU: its weights, random, fill 76 GB; no collectives.

    python scripts/bench_rank.py [--routing uniform|model] [--overlap F] [--layers N] [--quick] [--json] [--dry-run]
    python scripts/bench_rank.py --tp N [--routing ...] [--overlap F] [--layers N] [--quick] [--json]

A step verifies one tree of M nodes over a context: token ids in, each node's next token out. It is one CUDA graph.

    ms      replays queued one behind the other, by events: time on the GPU
    wall    a replay that the host starts and waits for, by its clock
    GB      what a step has to read: weights, the experts that are hit, the cache once per layer
    floor   the time for that at the rate at which this card was seen to read, in the same run
    =eager  whether the graph gives what the ops give one by one, bit for bit, and no NaN
    peer    vLLM 0.24.0 on such a shard on one H200, M sequences instead of M nodes; goal: ours

Then, per op: ms in a graph of that op alone, over all layers, and the share of the read rate. These leave out what
one op does for the next: overlap with its launch, activations in the cache. "rest" is ms minus their sum.

With --tp N, N such ranks on as many GPUs, with real collectives: see rank_tp.py.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.dry_run import dry_run  # noqa: E402
from scripts.gpu_time import about, capture, heading, missing, read_rate, replays, replays_alone, run_all  # noqa: E402
from scripts.k26 import LAYERS, Batch, Tensors, route, tree  # noqa: E402
from scripts.measure import spread, table  # noqa: E402
from scripts.rank_model import Choice, Notes, Rank, run  # noqa: E402
from scripts.ranks import placed, start  # noqa: E402

Point = tuple[int, int]  # M, context
PEER = {(1, 1024): 6.11, (8, 1024): 9.18, (16, 1024): 11.85, (32, 1024): 16.05, (64, 1024): 22.01, (1, 32768): 8.46}
GOAL = {(1, 1024): 3.0, (8, 1024): 5.0, (16, 1024): 7.2, (1, 32768): 3.6}
HEADER = ("M", "context", "ms", "p10", "p90", "wall", "GB", "floor", "x floor", "peer", "x faster", "goal", "=eager")
LEAST_LAUNCHES = 30  # in the graph of an op
SECONDS = 400.0  # for all ranks of --tp


@dataclass(frozen=True)
class Scope:
    """How much is run. steps, parts: replays of the step, and of each op's graph."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    steps: int
    parts: int

    @property
    def points(self) -> list[Point]:
        """What is measured."""
        return [(m, context) for context, m in itertools.product(self.contexts, self.rows)]


FULL = Scope((1, 8, 16, 32, 64), (1024, 32768), 40, 10)
QUICK = Scope((1, 8, 16), (1024,), 10, 3)


@dataclass(frozen=True)
class Routing:
    """Who chooses experts: the model's router, or a generator (`overlap`: share of experts that all nodes have)."""

    model: bool
    overlap: float

    def choices(self, tensors: Tensors, rows: int, layers: int) -> list[Choice | None]:
        """Of each layer."""
        return [None if self.model else route(tensors, rows, self.overlap, 1000 * rows + i) for i in range(layers)]

    def __str__(self) -> str:
        return "the model's router" if self.model else f"uniform, {self.overlap:.0%} shared by all nodes"


class Bench:
    """A rank, and what its points need."""

    def __init__(self, tensors: Tensors, layers: int, routing: Routing, scope: Scope) -> None:
        self._tensors, self._layers, self._routing, self._scope = tensors, layers, routing, scope
        self._batches: dict[Point, Batch] = {point: tree(tensors, *point) for point in scope.points}
        self._rank = Rank(tensors, layers, max(batch.cache_rows for batch in self._batches.values()))

    def note(self, point: Point) -> tuple[Notes, Choice, list[Choice | None]]:
        """A step op by op, its result, and the routing it had."""
        choices = self._routing.choices(self._tensors, point[0], self._layers)
        notes = Notes()
        return notes, self._rank.step(self._batches[point], choices, notes), choices

    def measure(self, point: Point) -> dict[str, Any]:
        """Times of one point, in microseconds."""
        notes, eager, choices = self.note(point)
        graph, result = capture(lambda: self._rank.step(self._batches[point], choices, run))
        steps = replays(graph, self._scope.steps)
        alone = replays_alone(graph, self._scope.steps // 2)
        same = all(torch.equal(a, b) for a, b in zip(eager, result, strict=True))  # never, if there is NaN
        ops = {name: self._op(name, notes) for name in notes.calls}
        found = {"rows": point[0], "context": point[1], "bytes": sum(notes.reads.values()), "as_eager": same}
        return found | {"step": spread(steps), "alone": spread(alone), "ops": ops}

    def _op(self, name: str, notes: Notes) -> dict[str, Any]:
        calls, reads = notes.calls[name], notes.reads[name]
        # A graph that is over before the host has sent the next would show the host's time. Weights are read once only.
        turns = 1 if reads else -(-LEAST_LAUNCHES // len(calls))
        graph, _ = capture(lambda: run_all(calls * turns))
        samples = [sample / turns for sample in replays(graph, self._scope.parts)]
        return {"calls": len(calls), "bytes": reads, "time": spread(samples)}


def measure(scope: Scope, layers: int, routing: Routing) -> dict[str, Any]:
    """All points, as plain values."""
    found = {"machine": about(), "read": read_rate(), "layers": layers, "routing": str(routing)}
    torch.cuda.empty_cache()
    started = time.perf_counter()
    bench = Bench(Tensors(torch.device("cuda")), layers, routing, scope)
    torch.cuda.synchronize()
    found |= {"build_s": time.perf_counter() - started, "weights": torch.cuda.memory_allocated()}
    points = []
    for point in scope.points:
        points.append(bench.measure(point))
        step = points[-1]["step"]
        print(f"M {point[0]}, context {point[1]}: {step['median'] / 1e3:.3f} ms", file=sys.stderr, flush=True)
    return found | {"unit": "microseconds", "points": points}


def show(result: Mapping[str, Any]) -> str:
    """The result as tables, in milliseconds."""
    points, rate = result["points"], result["read"]["bytes_per_s"]
    first = points[0]
    made = f"{result['weights'] / 1e9:.1f} GB made in {result['build_s']:.0f} s"
    read = f"read rate {rate / 1e12:.2f} TB/s (torch's {result['read']['by']})"
    counts = [part["n"] for part in (first["step"], first["alone"], first["ops"]["embedding"]["time"])]
    lines = [
        heading(result["machine"]),
        f"K2.6, one TP=8 rank, {result['layers']} layers, {made}; routing: {result['routing']}; {read}",
        "medians of {} replays, wall of {}, graphs of one op of {}".format(*counts),
        "",
        table(HEADER, [_step(point, rate, result["layers"] == LAYERS) for point in points]),
        "",
        _breakdown(points, rate),
    ]
    return "\n".join(lines)


def _step(point: Mapping[str, Any], rate: float, whole: bool) -> list[object]:
    key = (point["rows"], point["context"])
    ms, low, high = (point["step"][name] / 1e3 for name in ("median", "p10", "p90"))
    floor = 1e3 * point["bytes"] / rate
    peer, goal = (PEER.get(key), GOAL.get(key)) if whole else (None, None)
    times = [f"{x:.3f}" for x in (ms, low, high, point["alone"]["median"] / 1e3)]
    bound = [f"{point['bytes'] / 1e9:.2f}", f"{floor:.3f}", f"{ms / floor:.2f}"]
    others = [f"{peer:.2f}" if peer else "-", f"{peer / ms:.2f}" if peer else "-", f"{goal:.1f}" if goal else "-"]
    return [*key, *times, *bound, *others, "yes" if point["as_eager"] else "NO"]


def _breakdown(points: Sequence[Mapping[str, Any]], rate: float) -> str:
    """Ops by rows, points by columns: ms, and the share of the read rate where an op reads weights or cache."""
    names = list(dict.fromkeys(name for point in points for name in point["ops"]))
    rows = [[name, *(_cell(point["ops"].get(name), rate) for point in points)] for name in names]
    sums = [sum(op["time"]["median"] for op in point["ops"].values()) for point in points]
    rows.append(["sum", *(f"{total / 1e3:.3f}     " for total in sums)])
    rests = [(point["step"]["median"] - total) / 1e3 for point, total in zip(points, sums, strict=True)]
    rows.append(["rest", *(f"{rest:.3f}     " for rest in rests)])
    launches = (f"{sum(op['calls'] for op in point['ops'].values())}     " for point in points)
    header = ["op", *(f"{point['rows']}@{point['context'] // 1024}k     " for point in points)]
    return table(header, [*rows, ["ops in a step", *launches]])


def _cell(op: Mapping[str, Any] | None, rate: float) -> str:
    if op is None:
        return "-     "
    median = op["time"]["median"]
    share = f"{1e6 * op['bytes'] / median / rate:4.0%}" if op["bytes"] else "    "
    return f"{median / 1e3:.3f} {share}"


def rehearse(scope: Scope, routing: Routing) -> str:
    """Two layers on the CPU, nothing launched: what a step would launch, and the bytes of all 61 layers."""
    lines = []
    with dry_run() as paper:
        bench = Bench(Tensors(torch.device("cpu")), 2, routing, scope)
        for point in scope.points:
            paper.calls.clear()
            notes, _, _ = bench.note(point)
            lines.append(
                f"M {point[0]}, context {point[1]}: {len(paper.calls)} calls, {whole_bytes(notes) / 1e9:.2f} GB"
            )
    checked = "checked by the library" if paper.checks else "not checked"
    return "\n".join([*lines, f"ops: {', '.join(sorted({op for op, _ in paper.calls}))}; {checked}"])


def whole_bytes(notes: Notes) -> int:
    """What a step of 61 layers reads, of a step of two: one dense, one with experts."""
    once = {name: count for name, count in notes.reads.items() if name == "head" or name.startswith("dense")}
    each = {name: count for name, count in notes.reads.items() if name not in once}
    both = {name: count for name, count in each.items() if len(notes.calls[name]) == 2}
    experts = sum(each.values()) - sum(both.values())
    return sum(once.values()) + sum(both.values()) * LAYERS // 2 + experts * (LAYERS - 1)


def several(size: int, scope: Scope, layers: int, routing: Routing, as_json: bool) -> int:
    """Ranks with collectives; the exit code."""
    if torch.cuda.device_count() < size:
        print(f"bench_rank: --tp {size}: this machine has {torch.cuda.device_count()} GPUs", file=sys.stderr)
        return 1
    if not placed():
        return start(__file__, size, sys.argv[1:], SECONDS)
    from scripts.rank_tp import run_rank

    return run_rank(scope, layers, routing, as_json)


def share(text: str) -> float:
    """0..1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure a step of one TP=8 rank of Kimi K2.6 on one GPU.")
    parser.add_argument("--routing", choices=("uniform", "model"), default="uniform", help="who chooses experts")
    parser.add_argument("--overlap", type=share, default=0.0, help="share of experts that all nodes have (uniform)")
    parser.add_argument("--layers", type=int, default=LAYERS, help="fewer, where memory is short")
    parser.add_argument("--tp", type=int, default=1, help="ranks with collectives, a GPU each; 1: one without")
    parser.add_argument("--quick", action="store_true", help="fewer points, and fewer replays")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--dry-run", action="store_true", help="make the ops' arguments on the CPU, and launch nothing")
    chosen = parser.parse_args(arguments)
    if chosen.routing == "model" and chosen.overlap:
        parser.error("--overlap: only with --routing uniform")
    if chosen.layers < 1:
        parser.error(f"--layers {chosen.layers}: must be at least 1")
    if chosen.tp < 1 or (chosen.tp > 1 and chosen.dry_run):
        parser.error(f"--tp {chosen.tp}: must be at least 1, and 1 with --dry-run")
    scope, routing = QUICK if chosen.quick else FULL, Routing(chosen.routing == "model", chosen.overlap)
    if chosen.dry_run:
        print(rehearse(scope, routing))
        return
    if lack := missing():
        sys.exit(f"bench_rank: {lack}")
    if chosen.tp > 1:
        sys.exit(several(chosen.tp, scope, chosen.layers, routing, chosen.json))
    result = measure(scope, chosen.layers, routing)
    print(json.dumps(result) if chosen.json else show(result))


if __name__ == "__main__":
    main()
