"""Figures as a PNG, by matplotlib (extra `bench`). ValueError where there is none, or for what cannot be written."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdtp import files
from kdtp.bench.figures import gaps
from kdtp.bench.load import Record

_COLOURS = {"draft": "#2a78d6", "build": "#8250df", "verify": "#c2410c", "accept": "#0f8a7e", "commit": "#9aa5b1"}


def load_picture(path: Path, title: str, records: Sequence[Record], figures: Mapping[str, Any]) -> None:
    """Waiting for the first text, waiting for more, tokens over time, acceptance by depth."""
    figure, axes = _page(title, 2, 2)
    done = [r for r in records if not r.error]
    _shares(axes[0][0], [1e3 * (r.times[0] - r.due) for r in done if r.times], "first text, ms")
    _shares(axes[0][1], [1e3 * gap for r in done for gap in gaps(r)], "between two texts, ms")
    _over_time(axes[1][0], done)
    depths = figures["acceptance_by_depth"]
    axes[1][1].bar(range(1, len(depths) + 1), depths, color=_COLOURS["draft"])
    axes[1][1].set(xlabel="depth", ylabel="accepted / drafted", ylim=(0, 1))
    _save(figure, path)


def context_picture(path: Path, title: str, points: Sequence[Mapping[str, Any]]) -> None:
    """Speed, tokens per round, and a round's stages, over the length of the context."""
    figure, axes = _page(title, 1, 3)
    lengths = [point["context"] for point in points]
    for axis, key in ((axes[0], "tokens_per_second"), (axes[1], "tokens_per_round")):
        axis.plot(lengths, [point[key] for point in points], marker="o", color=_COLOURS["draft"])
        axis.set(xlabel="context, tokens", ylabel=key.replace("_", " "), ylim=(0, None))
    stages = [stage for stage in _COLOURS if stage in points[0]["round_ms"]]
    rows = [[point["round_ms"][stage] for point in points] for stage in stages]
    axes[2].stackplot(lengths, rows, labels=stages, colors=[_COLOURS[stage] for stage in stages])
    axes[2].set(xlabel="context, tokens", ylabel="ms per round", ylim=(0, None))
    axes[2].legend(loc="upper left")
    _save(figure, path)


def _page(title: str, rows: int, columns: int) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ValueError(f"--png: the package {error.name} is missing; pip install 'kdtp[bench]'") from None
    figure = Figure(figsize=(5 * columns, 3.6 * rows), layout="constrained", dpi=120)
    figure.suptitle(title)
    return figure, figure.subplots(rows, columns)


def _save(figure: Any, path: Path) -> None:
    """ValueError that names the file if it cannot be written."""
    try:
        with files.replacing(path) as file:
            figure.savefig(file, format="png")
    except OSError as error:
        raise ValueError(f"--png {error.filename or path}: {(error.strerror or str(error)).lower()}") from None


def _shares(axis: Any, values: Sequence[float], label: str) -> None:
    axis.ecdf(values or [0.0], color=_COLOURS["draft"])
    axis.set(xlabel=label, ylabel="share of all", ylim=(0, 1))


def _over_time(axis: Any, done: Sequence[Record]) -> None:
    """Tokens of each request, spread over its pieces of text."""
    moments = [(at, r.tokens / len(r.times)) for r in done for at in r.times]
    last = max((at for at, _ in moments), default=1.0)
    bins = 30
    counts = [0.0] * bins
    for at, tokens in moments:
        counts[min(bins - 1, int(bins * at / last))] += tokens
    width = last / bins
    rates = [count / width for count in counts]
    axis.bar([width * i for i in range(bins)], rates, width, align="edge", color=_COLOURS["verify"])
    axis.set(xlabel="seconds", ylabel="tokens / s")


def accept_picture(path: Path, title: str, points: Sequence[Mapping[str, Any]]) -> None:
    """Tokens per round and speed over the budget, a row for each temperature; a chain is a cross."""
    temperatures = sorted({point["temperature"] for point in points})
    figure, axes = _page(title, len(temperatures), 2)
    names = list(dict.fromkeys(point["drafter"] for point in points if point["method"] != "AR"))
    for row, temperature in enumerate(temperatures):
        mine = [point for point in points if point["temperature"] == temperature]
        for axis, key in zip(axes.reshape(-1, 2)[row], ("tokens_per_round", "tokens_per_second"), strict=True):
            plain = next(point[key] for point in mine if point["method"] == "AR")
            axis.axhline(plain, color="0.5", linestyle=":", label="plain decoding")
            for name, colour in zip(names, itertools.cycle(_COLOURS.values()), strict=False):
                drawn = {m: [p for p in mine if p["drafter"] == name and p["method"] == m] for m in ("tree", "chain")}
                for method, style in (("tree", {"marker": "o", "label": name}), ("chain", {"marker": "x"})):
                    budgets = [p["budget"] for p in drawn[method]]
                    axis.plot(budgets, [p[key] for p in drawn[method]], color=colour, **style)
            axis.set_xscale("log", base=2)
            axis.set(xlabel="budget, nodes", ylabel=f"{key.replace('_', ' ')}, T = {temperature:g}", ylim=(0, None))
    axes.flat[0].legend(fontsize="small")
    _save(figure, path)
