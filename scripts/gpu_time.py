"""Time on a GPU: CUDA graphs, their replays, and the rate at which this card reads its memory."""

from __future__ import annotations

import datetime
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from kdtp.kernels import abi
from scripts.measure import machine, spread

Result = TypeVar("Result")
Span = tuple[float, float, str]  # start and end in microseconds, what ran
WARM = 2  # replays that are not counted


def missing() -> str | None:
    """What this machine lacks."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    return None if abi.LIBRARY.is_file() else "the CUDA kernels are not built: run `kdtp build-kernels`"


def about() -> dict[str, object]:
    """Hardware, driver, versions, date."""
    properties = torch.cuda.get_device_properties(0)
    gpu = {"gpu": properties.name, "gib": round(properties.total_memory / 2**30, 1)}
    versions = {"driver": _driver(), "torch": torch.__version__, "cuda": torch.version.cuda}
    return gpu | versions | {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")} | machine()


def _driver() -> str:
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return lines[0] if lines else "unknown"


def heading(found: dict[str, Any]) -> str:
    """One line of what about() found."""
    line = "{gpu} ({gib} GiB), driver {driver}, torch {torch}, CUDA {cuda}, {date}; {cpu}, {cores} cores, load {load}"
    return line.format(**found)


def run_all(calls: Iterable[Callable[[], object]]) -> None:
    """Call each; what it gives is not kept."""
    for call in calls:
        call()


def capture(call: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """`call` as a graph, and the tensors that a replay fills. Its kernels were loaded by a call before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def replays(graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
    """Microseconds on the GPU of each of `times` replays that are queued one behind the other."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(WARM + times + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [1e3 * a.elapsed_time(b) for a, b in itertools.pairwise(events[WARM:])]


def replays_alone(graph: torch.cuda.CUDAGraph, times: int) -> list[float]:
    """Microseconds, by the host's clock, of replays that are waited for: the launch of the graph is in them."""
    samples = []
    for _ in range(times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        samples.append(1e6 * (time.perf_counter() - started))
    return samples


def read_rate(gib: int = 4, times: int = 12) -> dict[str, Any]:
    """Bytes per second that the card reads, by the fastest of some kernels of torch, and by which.

    A copy counts what it reads and what it writes.
    """
    x = torch.empty(gib << 28, device="cuda").normal_()
    rows, y = x.view(-1, 1 << 15), torch.empty_like(x)
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "sum": (x.sum, 1),
        "sums of rows": (lambda: rows.sum(1), 1),
        "maxima of rows": (lambda: rows.amax(1), 1),
        "copy": (lambda: y.copy_(x), 2),
    }
    rates = {}
    for name, (call, passes) in ways.items():
        call()
        graph, _ = capture(call)
        rates[name] = passes * x.nbytes / (1e-6 * spread(replays(graph, times))["median"])
    best = max(rates, key=lambda name: rates[name])
    return {"bytes_per_s": rates[best], "by": best, "all": rates, "n": times}


def spans_of(profile: torch.profiler.profile) -> list[Span]:
    """Kernels and copies of a profile that has ended, by their start; of the clock that all processes have."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(file))
        trace = json.loads(file.read_text())
    base = trace.get("baseTimeNanoseconds", 0) / 1e3
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    events = [event for event in trace["traceEvents"] if event.get("cat") in kinds]
    return sorted((base + e["ts"], base + e["ts"] + e["dur"], e["name"]) for e in events)
