"""Measure all-reduces of M x 7168 bfloat16 between the GPUs of this machine, by every way there is.

    python scripts/bench_allreduce.py [--ranks N] [--json]        # starts a process per GPU
    torchrun --nproc-per-node N scripts/bench_allreduce.py [--json]

    push        kdtp's kernel, of the same bits as `gather`
    push, norm  the same, then add + RMSNorm as a kernel of its own
    push+norm   both in one kernel
    nccl        NCCL's all_reduce, whose order of summation is its own
    gather      NCCL's all_gather, and the sum in rank order: what kdtp does above the crossover
    1-shot, 2-shot  torch's symmetric memory

Microseconds per call, medians, of the rank that takes longest: in a graph of 20 calls, and eager, 20 calls queued;
ways take turns. Before, each way sums other data in every replay of a graph, with ranks that are late: `wrong` counts
results that are not the sum, bit for bit for push and gather. A way that fails is left out, and its error said. With
fewer GPUs than ranks all share the first one and take turns: such figures say nothing but that it works. NVLink
multicast is off.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from kdtp.model import push  # noqa: E402
from kdtp.model.layers import Norm  # noqa: E402
from scripts import reduce_ways  # noqa: E402
from scripts.gpu_time import about, heading, missing, run_all  # noqa: E402
from scripts.measure import spread, table  # noqa: E402
from scripts.ranks import Joined, everywhere, join, leave, placed, slowest, start  # noqa: E402
from scripts.reduce_ways import WIDTH, Way  # noqa: E402

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 146, 292)  # 14 KB to 4 MB
CALLS, TIMES, CHECKS = 20, 15, 20
QUICK = (1, 16, 64), 3  # rows and times of ranks that share a GPU
SECONDS = 240.0
Make = Callable[[int], Iterator[Way]]


@dataclass
class Found:
    """times: by rows and way, microseconds in a graph and eager; wrong: of how many checks; lacks: what fails, why."""

    times: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    wrong: dict[str, list[int]] = field(default_factory=dict)
    lacks: dict[str, str] = field(default_factory=dict)


class Bench:
    """One rank."""

    def __init__(self, joined: Joined) -> None:
        self._base, self._alone = joined.base, joined.alone
        self._rows, self._times = (ROWS, TIMES) if joined.alone else QUICK
        self._norm = Norm(torch.linspace(0.5, 2, WIDTH, device="cuda"), 1e-5)
        self.found = Found()

    def measure(self, kind: str, make: Make) -> None:
        """The ways of a kind, for all sizes. What fails ends the kind."""
        for rows in self._rows:
            _, error = everywhere(self._base, lambda rows=rows: self._point(rows, make))  # type: ignore[misc]
            if error:
                self.found.lacks[f"{kind}, M = {rows}"] = error
                return

    def _point(self, rows: int, make: Make) -> None:
        ways = list(make(rows))
        for way in ways:
            count = self.found.wrong.setdefault(way.name, [0, 0])
            count[0] += reduce_ways.wrong(way, self._base, self._norm, CHECKS)
            count[1] += CHECKS
        graphs = [reduce_ways.capture(way, CALLS) for way in ways]
        samples: list[tuple[list[float], list[float]]] = [([], []) for _ in ways]
        for _ in range(self._times):
            for way, graph, (in_graph, eager) in zip(ways, graphs, samples, strict=True):
                in_graph.append(_microseconds(graph.replay))
                eager.append(_microseconds(lambda way=way: run_all([way.call] * CALLS)))  # type: ignore[misc]
        for way, kinds in zip(ways, samples, strict=True):
            both = slowest(self._base, [spread(each)["median"] for each in kinds])
            self.found.times.setdefault(rows, {})[way.name] = both


def _microseconds(calls: Callable[[], object]) -> float:
    """Of one of CALLS calls, on the GPU; the same calls go before, so that the ranks begin together."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    calls()
    events[0].record()
    calls()
    events[1].record()
    torch.cuda.synchronize()
    return 1e3 * events[0].elapsed_time(events[1]) / CALLS


def plain(joined: Joined, found: Found) -> dict[str, Any]:
    """The result as plain values."""
    most = joined.chosen.most if isinstance(joined.chosen, push.Push) else 0
    head = {"machine": about(), "ranks": joined.base.size, "own_gpus": joined.alone, "most": most}
    return head | {"missing": found.lacks, "wrong": found.wrong, "points": found.times}


def show(result: Mapping[str, Any]) -> str:
    """The result as two tables."""
    note = "" if result["own_gpus"] else "; ALL ON ONE GPU, TAKING TURNS: not a measurement"
    picks = f"the start-up probe pushes up to {result['most'] >> 10} KiB"
    lines = [heading(result["machine"]), f"{result['ranks']} ranks{note}; {picks}"]
    lines += [f"no {what}: {why}" for what, why in result["missing"].items()]
    counts = (f"{name} {bad}/{of}" for name, (bad, of) in result["wrong"].items())
    lines.append(f"wrong: {'; '.join(counts)}")
    names = list(dict.fromkeys(name for ways in result["points"].values() for name in ways))
    for kind, title in enumerate(("in a graph, us", "eager, us")):
        rows = [_row(m, ways, names, kind) for m, ways in result["points"].items()]
        lines += ["", table([title, "KiB", *names], rows)]
    return "\n".join(lines)


def _row(rows: int, ways: Mapping[str, Sequence[float]], names: Sequence[str], kind: int) -> list[object]:
    cells = [f"{ways[name][kind]:.1f}" if name in ways else "-" for name in names]
    return [f"M = {rows}", rows * WIDTH * 2 // 1024, *cells]


def run_rank(as_json: bool) -> None:
    """One rank; the first one prints. What is most likely to fail comes last, and what there is until then is shown."""
    joined = join()
    bench = Bench(joined)
    norm = Norm(torch.linspace(0.5, 2, WIDTH, device="cuda"), 1e-5)
    if isinstance(joined.chosen, push.Push):
        comm = joined.chosen.up_to(push.MOST)
        bench.measure("push", lambda rows: reduce_ways.pushed(comm, rows, norm))
        comm.check()
    else:
        bench.found.lacks["push"] = "these GPUs do not map each other's memory, or it does not work: see above"
    if joined.alone:
        bench.measure("nccl", lambda rows: reduce_ways.nccl(joined.base, rows))
        if joined.base.rank == 0:
            print(f"so far:\n{show(plain(joined, bench.found))}\n", file=sys.stderr, flush=True)
        bench.measure("symmetric memory", reduce_ways.symmetric)
    if joined.base.rank == 0:
        result = plain(joined, bench.found)
        print(json.dumps(result) if as_json else show(result), flush=True)
    leave()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=0, help="default: as many as there are GPUs, at least 2")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    chosen = parser.parse_args()
    if lack := missing():
        sys.exit(f"bench_allreduce: {lack}")
    if placed():
        run_rank(chosen.json)
    sys.exit(start(__file__, chosen.ranks or max(2, torch.cuda.device_count()), sys.argv[1:], SECONDS))


if __name__ == "__main__":
    main()
