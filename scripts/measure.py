"""What every benchmark here needs: the spread of its samples, an aligned table, the machine's name."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

Spread = dict[str, float]


def spread(samples: Sequence[float]) -> Spread:
    """Number of samples, median, 10th and 90th percentile."""
    low, median, high = np.percentile(samples, (10, 50, 90)).tolist()
    return {"n": len(samples), "median": median, "p10": low, "p90": high}


def spreads(samples: Mapping[str, Sequence[float]]) -> dict[str, Spread]:
    """The spread of each of several figures."""
    return {name: spread(values) for name, values in samples.items()}


def figure(s: Spread) -> str:
    """Median (10th-90th percentile)."""
    return f"{s['median']:.0f} ({s['p10']:.0f}-{s['p90']:.0f})"


def repeat(call: Callable[[], object], times: int) -> list[float]:
    """Microseconds of each of `times` calls, after one that is not counted."""
    call()
    samples = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        samples.append(1e6 * (time.perf_counter() - started))
    return samples


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns aligned, the first to the left; floats without decimals."""
    cells = [list(header), *([f"{cell:.0f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *others in cells:
        padded = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *padded]))
    return "\n".join(lines)


def machine() -> dict[str, object]:
    """The processor's name and number of cores, and how busy the machine was in the last minute."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(": ", 1)[1] for line in lines if line.startswith("model name")), "unknown")
    return {"cpu": name, "cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1)}
