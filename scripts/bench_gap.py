"""How long GPUs wait for the host between two rounds: from the ids of one to the first kernel of the next.

    python scripts/bench_gap.py [--model FILE.kdtr] [--tokens N]
    python scripts/bench_gap.py --tp N ...

CUDA graphs; one rank in the coordinator's process, or N beside it. The golden models are small, so the gap is nearly
all of a round; it is the host's work and does not grow with the model. Microseconds, by the GPU's own clock
(torch.profiler):

    gap      from the end of the copy of the chosen ids, on the last rank to have them, to the start of the next forward
             (that of its embedding's kernel) on the first rank to run it
    kernels  a round's time on the GPU, from there to its ids
    taken    by the host's clock, not profiled: from the ids on the last rank to the step's message on the last rank
    launched likewise, until the last rank has launched its forward
    round    likewise, to the next ids
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp.config import BUSY_WAITS, DrafterConfig, EngineConfig  # noqa: E402
from kdtp.engine import rundir  # noqa: E402
from kdtp.engine.api import Engine  # noqa: E402
from kdtp.types import SamplingParams  # noqa: E402
from scripts.gpu_time import Span, about, heading, missing, spans_of  # noqa: E402
from scripts.measure import figure, spread, table  # noqa: E402
from scripts.ranks import NO_MULTICAST  # noqa: E402

WAYS = {"plain decoding": DrafterConfig("none"), "n-gram, 16 nodes": DrafterConfig("ngram", budget=16)}
MODEL = ROOT / "tests" / "refs" / "model_tiny.kdtr"
FIRST = "embedding"  # in the name of a forward's first kernel
HEADER = ("drafter", "ranks", "rounds", "gap", "kernels", "taken", "launched", "round")
Step = tuple[int, int, int, int]  # number; nanoseconds: taken, launched, ids
Figures = dict[str, list[float]]


def timeline(model: Path, drafter: DrafterConfig, tokens: int) -> list[Span]:
    """Kernels and copies of a completion, one behind the other; the same was run before."""
    prompt = list(range(1, 9)) * 2
    params = SamplingParams(max_tokens=tokens)
    with Engine(str(model), device="cuda", dtype="bfloat16", drafter=drafter) as engine:
        engine.generate([prompt], params)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            engine.generate([prompt], params)
    return spans_of(profile)


def rounds(spans: Sequence[Span]) -> list[list[Span]]:
    """Cut behind each copy to the host: the ids of a round. What comes before the first one is the prompt's."""
    ends = [i + 1 for i, span in enumerate(spans) if "DtoH" in span[2]]
    return [list(spans[a:b]) for a, b in itertools.pairwise(ends)]


def measure(ranks: Sequence[Sequence[Span]]) -> Figures:
    """The gap before each round's forward, and its time from there to its ids, of what each rank ran."""
    found: Figures = {"gap": [], "kernels": []}
    cut = [rounds(spans) for spans in ranks]
    if len({len(each) for each in cut}) != 1:
        raise ValueError(f"ranks of {[len(each) for each in cut]} rounds: their traces are not whole")
    for before, this in itertools.pairwise(zip(*cut, strict=True)):
        first = min(start for each in this for start, _, name in each if FIRST in name)
        found["gap"].append(first - max(each[-1][1] for each in before))
        found["kernels"].append(max(each[-1][1] for each in this) - first)
    return found


def by_host(ranks: Sequence[Sequence[Step]], first: int, last: int) -> Figures:
    """From the last rank's ids to where the last rank is, of the steps numbered so but the first."""
    steps = [{number: times for number, *times in each if first <= number <= last} for each in ranks]
    found: Figures = {"taken": [], "launched": [], "round": []}
    for number in sorted(steps[0])[1:]:
        if all(number - 1 in each for each in steps):
            ids = max(each[number - 1][2] for each in steps)
            for i, name in enumerate(found):
                found[name].append((max(each[number][i] for each in steps) - ids) / 1e3)
    return found


def several(config: EngineConfig, tokens: int) -> Figures:
    """All figures of several ranks under the launcher. RuntimeError if they fail; their log says why."""
    folder = rundir.create()
    with tempfile.TemporaryDirectory() as notes:
        lead = f"scripts/gap_lead.py {notes} {folder} '{json.dumps(config.mapping())}' {tokens}"
        command = [sys.executable, "-m", "launcher", "--nproc", str(config.tp), "--lead", lead, "--"]
        command += ["scripts/gap_rank.py", notes, "--run-dir", str(folder), "--log-level", "warning"]
        try:
            code = subprocess.run(command, cwd=ROOT, timeout=180, env=os.environ | NO_MULTICAST).returncode
        finally:
            rundir.remove(folder)
        if code:
            raise RuntimeError(f"{config.tp} ranks: ended with code {code}")
        left: list[dict[str, Any]] = [_read(Path(notes) / f"rank-{rank}.json") for rank in range(config.tp)]
        first, last = _read(Path(notes) / "steps.json")
    found = by_host([each["steps"] for each in left], first, last)
    spans = [[(start, end, name) for start, end, name in each["spans"]] for each in left]
    try:
        return found | (measure(spans) if all(spans) else {})
    except ValueError as error:  # the host's figures are still good
        print(f"bench_gap: no figures of the GPUs' clock: {error}", file=sys.stderr)
        return found


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def row(name: str, ranks: int, found: Figures) -> list[object]:
    """A line of the table."""
    cells = [figure(spread(found[key])) if found.get(key) else "-" for key in HEADER[3:]]
    return [name, ranks, len(next(iter(found.values()))), *cells]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a KDTR file")
    parser.add_argument("--tokens", type=int, default=200, help="to generate")
    parser.add_argument("--tp", type=int, default=1, help="ranks, a GPU each")
    parser.add_argument("--busy-wait", choices=BUSY_WAITS, default="auto", help="of several ranks, as `kdtp serve`")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to see that it works")
    chosen = parser.parse_args()
    if chosen.tp == 1 and chosen.device == "cpu":
        parser.error("--device cpu: only with --tp 2 or more")
    if chosen.device == "cuda" and (lack := missing()):
        print(f"bench_gap: {lack}", file=sys.stderr)
        return 1
    rows = []
    for name, drafter in WAYS.items():
        if chosen.tp == 1:
            found = measure([timeline(chosen.model, drafter, chosen.tokens)])
        else:
            model = str(chosen.model.absolute())
            rest: dict[str, Any] = {"drafter": drafter, "step_timeout": 60.0, "busy_wait": chosen.busy_wait}
            config = EngineConfig(model, chosen.tp, chosen.device, "bfloat16", **rest)
            found = several(config, chosen.tokens)
        rows.append(row(name, chosen.tp, found))
        print(*rows[-1], file=sys.stderr, flush=True)
    print(heading(about()) if torch.cuda.is_available() else "no GPU: only to see that it works")
    print(table(HEADER, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
