"""How long a GPU waits for the host between two rounds: from the ids of one to the first kernel of the next.

    python scripts/bench_gap.py [--model FILE.kdtr] [--tokens N]

One rank, in the coordinator's process, CUDA graphs. The golden models are small, so the gap is nearly all of a round;
it is the host's work and does not grow with the model. Microseconds from the end of the copy of the chosen ids to the
start of the next kernel, by the GPU's own clock (torch.profiler); `kernels`: a round's time on the GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp.config import DrafterConfig  # noqa: E402
from kdtp.engine.api import Engine  # noqa: E402
from kdtp.types import SamplingParams  # noqa: E402
from scripts.gpu_time import about, heading, missing  # noqa: E402
from scripts.measure import spread, table  # noqa: E402

Span = tuple[float, float, str]  # start and end in microseconds, what ran
WAYS = {"plain decoding": DrafterConfig("none"), "n-gram, 16 nodes": DrafterConfig("ngram", budget=16)}
MODEL = ROOT / "tests" / "refs" / "model_tiny.kdtr"


def timeline(model: Path, drafter: DrafterConfig, tokens: int) -> list[Span]:
    """Kernels and copies of a completion, one behind the other; the same was run before."""
    prompt = list(range(1, 9)) * 2
    params = SamplingParams(max_tokens=tokens)
    with Engine(str(model), device="cuda", dtype="bfloat16", drafter=drafter) as engine:
        engine.generate([prompt], params)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            engine.generate([prompt], params)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    found = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in events if e.get("cat") in kinds]
    return sorted(found)


def rounds(spans: list[Span]) -> list[list[Span]]:
    """Cut behind each copy to the host: the ids of a round. What comes before the first one is the prompt's."""
    ends = [i + 1 for i, span in enumerate(spans) if "DtoH" in span[2]]
    return [spans[a:b] for a, b in itertools.pairwise(ends)]


def measure(spans: list[Span]) -> dict[str, list[float]]:
    """The gap before each round's first kernel, and its time from there to its ids."""
    found: dict[str, list[float]] = {"gap": [], "kernels": []}
    for before, this in itertools.pairwise(rounds(spans)):
        first = next(start for start, _, name in this if "memcpy" not in name.lower())
        found["gap"].append(first - before[-1][1])
        found["kernels"].append(this[-1][1] - first)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a KDTR file")
    parser.add_argument("--tokens", type=int, default=200, help="to generate")
    chosen = parser.parse_args()
    if lack := missing():
        print(f"bench_gap: {lack}", file=sys.stderr)
        return 1
    rows = []
    for name, drafter in WAYS.items():
        found = measure(timeline(chosen.model, drafter, chosen.tokens))
        cells = [f"{value[key]:.0f}" for value in map(spread, found.values()) for key in ("median", "p10", "p90")]
        rows.append([name, len(found["gap"]), *cells])
    print(heading(about()))
    print(table(("drafter", "rounds", "gap", "p10", "p90", "kernels", "p10", "p90"), rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
