"""Kimi K2.6 with TP=8 on paper: memory of a rank, and what a step must read and wait for, on two machines.

    python scripts/scaling.py [--machine pro|h200] [--read-rate TB/S] [--matrix-rate TFLOP/S] [--memory GIB]
        [--all-reduce US] [--overlap F] [--rows M ...] [--contexts N ...]
    python scripts/scaling.py --update docs/scaling.md

A step verifies one tree of M nodes (M = 1: plain decoding) over a context. Shapes are scripts/k26.py's; steps measured
on one GPU, and the rate at which it reads, are those of docs/benchmarks.md. docs/scaling.md says what is assumed.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.k26 import HIDDEN, TOPK  # noqa: E402
from scripts.k26_cost import (  # noqa: E402
    ALWAYS,
    EXPERT_BYTES,
    KV_BYTES,
    LONGEST,
    MORE,
    PARTS,
    RESERVE,
    ROPE_BYTES,
    WEIGHTS,
    Machine,
    expected_experts,
    kv_tokens,
    step_bytes,
    working_memory,
)
from scripts.measure import table  # noqa: E402

Point = tuple[int, int]  # M, context

KIB = 1024.0
PRO_WAITS = ((14_336, 11.8), (32 * KIB, 26.2), (64 * KIB, 25.6), (128 * KIB, 32.1), (256 * KIB, 37.3))
PRO_WAITS += ((512 * KIB, 63.6), (1024 * KIB, 86.1))
H200_WAITS = ((8 * KIB, 5.7), (64 * KIB, 7.8), (512 * KIB, 16.7), (1024 * KIB, 22.1))


def measured(text: str) -> tuple[float, dict[Point, float]]:
    """The read rate, bytes per second, and milliseconds of the steps that docs/benchmarks.md has of one rank."""
    section = text.split("## One TP=8 rank", 1)[-1].split("\n## ", 1)[0]
    rate = re.search(r"read rate ([\d.]+) TB/s", section)
    steps = re.findall(r"^(\d+) +(\d+) +([\d.]+) .* (?:yes|NO)$", section, re.MULTILINE)
    if rate is None or not steps or len({step[:2] for step in steps}) != len(steps):
        raise ValueError("docs/benchmarks.md: want one table of bench_rank.py under '## One TP=8 rank', with its rate")
    return 1e12 * float(rate[1]), {(int(m), int(context)): float(ms) for m, context, ms in steps}


@dataclass(frozen=True)
class Report:
    """What is printed, and for which machines, trees, contexts."""

    machines: tuple[Machine, ...]
    steps: dict[Point, float]
    overlap: float
    rows: tuple[int, ...]
    contexts: tuple[int, ...]

    def tables(self) -> dict[str, str]:
        """By name."""
        found = {"weights": _weights(), "memory": self._memory(), "experts": self._experts()}
        found["bytes"] = self._grid(lambda m, n: f"{step_bytes(m, n, self.overlap) / 1e9:.2f}", "GB")
        found["collectives"] = self._collectives()
        for machine in self.machines:
            name = machine.name.lower().replace(" ", "-")
            found[f"floor-{name}"] = self._floors(machine)
            found[f"worth-{name}"] = self._worth(machine)
        if len(self.machines) == 2:
            found["projection"] = self._projection(*self.machines)
        return found

    def _grid(self, cell: Callable[[int, int], str], unit: str) -> str:
        rows = [[_context(n), *(cell(m, n) for m in self.rows)] for n in self.contexts]
        return table([f"{unit}, context", *(f"M={m}" for m in self.rows)], rows)

    def _memory(self) -> str:
        rows = [
            [
                machine.name,
                *(f"{x / 1e9:.1f}" for x in (machine.memory * 2**30, WEIGHTS + MORE, working_memory())),
                f"{RESERVE / 1e9:.1f}",
                f"{kv_tokens(machine) * (KV_BYTES + ROPE_BYTES) / 1e9:.1f}",
                f"{kv_tokens(machine) // 1000} k",
                f"{kv_tokens(machine) / LONGEST:.1f}",
            ]
            for machine in self.machines
        ]
        return table(("GB", "card", "weights", "working", "reserve", "KV", "positions", "of 256k"), rows)

    def _experts(self) -> str:
        shares = sorted({self.overlap, 0.0, 0.25, 0.5, 0.75})
        rows = [[m, *(_experts_cell(m, share) for share in shares)] for m in self.rows]
        return table(("M", *(f"{share:.0%} in common" for share in shares)), rows)

    def _collectives(self) -> str:
        header = ["M", "bytes", *itertools.chain(*((f"{m.name}: us each", "ms a step") for m in self.machines))]
        rows = [[m, 2 * HIDDEN * m, *itertools.chain(*(_waits(x, m) for x in self.machines))] for m in self.rows]
        return table(header, rows)

    def _floors(self, machine: Machine) -> str:
        def cell(m: int, n: int) -> str:
            return f"{machine.floor(m, n, self.overlap):.2f} {machine.step(m, n, self.overlap):6.2f}"

        return self._grid(cell, "ms")

    def _worth(self, machine: Machine) -> str:
        def cell(m: int, n: int) -> str:
            step, plain = (machine.step(x, n, self.overlap) for x in (m, 1))
            return f"{step / plain:.2f}" if m > 1 else f"{1e3 / plain:.0f} tok/s"

        return self._grid(cell, "x AR")

    def _projection(self, pro: Machine, h200: Machine) -> str:
        rows = []
        for (m, n), ms in self.steps.items():
            floor, on_h200 = h200.floor(m, n, 0.0), ms + h200.collectives(m)
            kept = ms - floor + pro.step(m, n, 0.0)
            scaled = ms * h200.read_rate / pro.read_rate + pro.collectives(m)
            times = [f"{x:.2f}" for x in (ms, floor, ms - floor, on_h200)]
            rows.append([m, _context(n), *times, f"{1e3 / on_h200:.0f}", f"{kept:.1f} .. {scaled:.1f}"])
        return table(("M", "context", "measured", "floor", "rest", "8x H200", "steps/s", "8x RTX PRO 6000"), rows)


def _weights() -> str:
    rows = [
        [
            part.name,
            part.layers,
            f"{part.weights * part.width / 1e6:.2f}",
            f"{part.bytes / 1e9:.3f}",
            f"{(part.bytes if part.read else 0) / 1e9:.3f}" if part.width == 2 else f"{EXPERT_BYTES * TOPK / 1e9:.3f}",
        ]
        for part in PARTS
    ]
    read = ALWAYS + EXPERT_BYTES * TOPK
    rows.append(["all, as the measured shard", "", "", f"{WEIGHTS / 1e9:.3f}", f"{read / 1e9:.3f}"])
    more = ((WEIGHTS + MORE) / 1e9, (read + MORE) / 1e9)
    rows.append(["all, router in float32 as the engine", "", "", *(f"{x:.3f}" for x in more)])
    return table(("weights of a rank", "layers", "MB a layer", "GB", "GB read, M=1"), rows)


def _experts_cell(rows: int, share: float) -> str:
    count = expected_experts(rows, share)
    return f"{count:.1f}, {count * EXPERT_BYTES / 1e9:5.2f} GB"


def _waits(machine: Machine, rows: int) -> tuple[str, str]:
    return f"{machine.wait(2 * HIDDEN * rows):.1f}", f"{machine.collectives(rows):.2f}"


def _context(positions: int) -> str:
    return f"{positions // 1024}k" if positions % 1024 == 0 else str(positions)


def updated(doc: str, tables: dict[str, str]) -> str:
    """`doc` with each block that follows a line <!-- scaling: NAME --> made new; ValueError for one without a table."""

    def block(match: re.Match[str]) -> str:
        if match[1] not in tables:
            raise ValueError(f"scaling: {match[1]}: no such table; there are {', '.join(tables)}")
        return f"<!-- scaling: {match[1]} -->\n```text\n{tables[match[1]]}\n```"

    return re.sub(r"<!-- scaling: (\S+) -->\n```text\n.*?\n```", block, doc, flags=re.DOTALL)


def report() -> Report:
    """As docs/scaling.md has it."""
    rate, steps = measured((ROOT / "docs" / "benchmarks.md").read_text())
    pro = Machine("RTX PRO 6000", 95.0, 0.8 * 1.792e12, 240e12, PRO_WAITS)
    h200 = Machine("H200", 139.0, rate, 773e12, H200_WAITS)
    contexts = tuple(k << 10 for k in (1, 8, 32, 64, 128, 256))
    return Report((pro, h200), steps, 0.0, (1, 2, 4, 8, 16, 32, 64), contexts)


def _changed(machine: Machine, chosen: argparse.Namespace) -> Machine:
    found = {
        "read_rate": chosen.read_rate and 1e12 * chosen.read_rate,
        "matrix_rate": chosen.matrix_rate and 1e12 * chosen.matrix_rate,
        "memory": chosen.memory,
        "all_reduce": chosen.all_reduce and ((0.0, chosen.all_reduce),),
    }
    return dataclasses.replace(machine, **{name: value for name, value in found.items() if value is not None})


def positive(text: str) -> float:
    """A number above 0."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError
    return value


def share(text: str) -> float:
    """0..1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise ValueError
    return value


def count(text: str) -> int:
    """1 or more."""
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def parse(arguments: Sequence[str] | None, usual: Report) -> tuple[Report, Path | None]:
    """What to report, and the document to bring up to date."""
    parser = argparse.ArgumentParser(description="Kimi K2.6 with TP=8 on paper.")
    names = {"pro": usual.machines[0], "h200": usual.machines[1]}
    parser.add_argument("--machine", choices=names, help="only this one; its figures can then be given")
    parser.add_argument("--read-rate", type=positive, help="TB/s that a GPU reads")
    parser.add_argument("--matrix-rate", type=positive, help="TFLOP/s of its matrix products in bfloat16")
    parser.add_argument("--memory", type=positive, help="GiB of a GPU")
    parser.add_argument("--all-reduce", type=positive, help="microseconds of an all-reduce, whatever its size")
    parser.add_argument("--overlap", type=share, default=0.0, help="share of experts that all nodes have in common")
    parser.add_argument("--rows", type=count, nargs="+", default=usual.rows, help="nodes of a tree, M")
    parser.add_argument("--contexts", type=count, nargs="+", default=usual.contexts, help="committed positions")
    parser.add_argument("--update", type=Path, help="this document's tables, instead of printing; takes nothing else")
    chosen = parser.parse_args(arguments)
    own = [name for name in ("read_rate", "matrix_rate", "memory", "all_reduce") if getattr(chosen, name) is not None]
    if own and chosen.machine is None:
        parser.error(f"--{own[0].replace('_', '-')}: say of which --machine")
    machines = (_changed(names[chosen.machine], chosen),) if chosen.machine else usual.machines
    found = Report(machines, usual.steps, chosen.overlap, tuple(chosen.rows), tuple(chosen.contexts))
    if chosen.update is not None and found != usual:
        parser.error("--update: takes no other option")
    return found, chosen.update


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    found, document = parse(arguments, report())
    tables = found.tables()
    if document is not None:
        document.write_text(updated(document.read_text(), tables))
        return
    print("\n\n".join(f"{name}\n{text}" for name, text in tables.items()))


if __name__ == "__main__":
    main()
