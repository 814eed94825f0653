"""Measure every kernel at one TP=8 rank's shapes of Kimi K2.6, with torch's way beside it where there is one.

    python scripts/bench_kernels.py [--only OP ...] [--quick] [--json] [--dry-run]

A time is a share of a CUDA graph of many launches, by events: the gap to the launch behind is in it. Weights and caches
take turns so that the L2 cache (50 MB) helps none. "share" is of the rate at which this card was seen to read, in the
same run. Not comparable, and left out: an attention of torch with a dense mask; INT4 experts; trees (bench_tree.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.dry_run import dry_run  # noqa: E402
from scripts.gpu_time import about, capture, heading, missing, read_rate, replays, run_all  # noqa: E402
from scripts.k26 import Tensors  # noqa: E402
from scripts.kernel_cases import Case, Cases  # noqa: E402
from scripts.measure import Spread, spread, table  # noqa: E402

MOST_LAUNCHES, MOST_BYTES = 64, 4 << 30  # of one graph, beyond one for each set of weights


@dataclass(frozen=True)
class Scope:
    """How much is run: M, contexts, replays of each graph."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    times: int


FULL = Scope((1, 8, 16, 32, 64), (1024, 32768, 131072), 20)
QUICK = Scope((1, 16), (1024,), 5)


def time_of(calls: Sequence[Callable[[], Any]], moved: int, times: int) -> Spread:
    """Microseconds of one call."""
    launches = max(len(calls), min(MOST_LAUNCHES, MOST_BYTES // max(moved, 1)))
    launches = -(-launches // len(calls)) * len(calls)
    calls[0]()  # loads the kernel
    graph, _ = capture(lambda: run_all(itertools.islice(itertools.cycle(calls), launches)))
    return spread([sample / launches for sample in replays(graph, times)])


def measure_case(op: str, case: Case, times: int) -> dict[str, Any]:
    """Plain values of one case."""
    found = {"op": op, "name": case.name, "rows": case.rows, "moved": case.moved, "flops": case.flops}
    ours = time_of(case.calls, case.moved, times)
    theirs = time_of(case.torch, case.moved, times) if case.torch else None
    return found | {"sets": len(case.calls), "kdtp": ours, "torch": theirs}


def measure(scope: Scope, ops: Iterable[str]) -> dict[str, Any]:
    """All cases of these ops."""
    found = {"machine": about(), "read": read_rate(), "unit": "microseconds"}
    torch.cuda.empty_cache()
    cases = Cases(Tensors(torch.device("cuda")), scope.rows, scope.contexts)
    return found | {"cases": [measure_case(op, case, scope.times) for op in ops for case in cases.ops[op]()]}


def show(result: Mapping[str, Any]) -> str:
    """The result as two tables: times, and rates of what reads a lot."""
    cases, rate = result["cases"], result["read"]["bytes_per_s"]
    names = list(dict.fromkeys(case["name"] for case in cases))
    rows = sorted({case["rows"] for case in cases})
    found = {(case["name"], case["rows"]): case for case in cases}
    header = [f"M={m}" for m in rows]
    times = [[name, *(_times(found.get((name, m))) for m in rows)] for name in names]
    heavy = [name for name in names if any(case["moved"] for case in cases if case["name"] == name)]
    rates = [[name, *(_rates(found.get((name, m)), rate) for m in rows)] for name in heavy]
    about = (
        f"read rate {rate / 1e12:.2f} TB/s (torch's {result['read']['by']}); medians of {cases[0]['kdtp']['n']} graphs"
    )
    return "\n".join(
        [
            heading(result["machine"]),
            about,
            "",
            table(["us (torch: us)", *header], times),
            "",
            table(["TB/s, share of the read rate; mla_tree: TFLOP/s", *header], rates),
        ]
    )


def _times(case: Mapping[str, Any] | None) -> str:
    if case is None:
        return "-"
    ours = f"{case['kdtp']['median']:.1f}"
    return f"{ours} ({case['torch']['median']:.1f})" if case["torch"] else ours


def _rates(case: Mapping[str, Any] | None, rate: float) -> str:
    if case is None:
        return "-"
    seconds = 1e-6 * case["kdtp"]["median"]
    moved = f"{case['moved'] / seconds / 1e12:.2f} {case['moved'] / seconds / rate:4.0%}"
    return f"{moved} {case['flops'] / seconds / 1e12:3.0f}" if case["op"] == "mla_tree" else moved


def rehearse(scope: Scope, ops: Iterable[str]) -> str:
    """Every case once on the CPU, nothing launched."""
    lines = []
    with dry_run() as paper:
        cases = Cases(Tensors(torch.device("cpu")), scope.rows, scope.contexts)
        for op in ops:
            paper.calls.clear()
            names: dict[str, None] = {}
            for case in cases.ops[op]():
                case.calls[0]()
                names[case.name] = None
            lines.append(f"{op}: {len(paper.calls)} calls; {', '.join(names)}")
    return "\n".join([*lines, "checked by the library" if paper.checks else "not checked: the library is not built"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    legal = list(Cases(Tensors(torch.device("cpu")), (), ()).ops)
    parser = argparse.ArgumentParser(description="Measure every kernel at one TP=8 rank's shapes of Kimi K2.6.")
    parser.add_argument("--only", nargs="+", choices=legal, default=legal, metavar="OP", help=", ".join(legal))
    parser.add_argument("--quick", action="store_true", help="fewer M, one context, fewer replays")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--dry-run", action="store_true", help="make the ops' arguments on the CPU, and launch nothing")
    chosen = parser.parse_args(arguments)
    scope = QUICK if chosen.quick else FULL
    if chosen.dry_run:
        print(rehearse(scope, chosen.only))
        return
    if lack := missing():
        sys.exit(f"bench_kernels: {lack}")
    result = measure(scope, chosen.only)
    print(json.dumps(result) if chosen.json else show(result))


if __name__ == "__main__":
    main()
