"""Widths by measured cost against fixed ones, by simulation: recorded times of forwards, drafts synthetic or recorded.

    python scripts/bench_width.py [--rounds 1500] [--batch 1,4,16,32]
    python scripts/bench_width.py --model DIR --drafter-model DIR --text FILE [--prompts 16] [--tokens 128]

For each machine, kind of text and batch: tokens per second of plain decoding, of fixed budgets, and of
kdtp.spec.width.Policy, which sees times with noise and learns as in the engine. The round's time is T(rows) of the
machine plus the draft's. A synthetic draft's distributions are as sharp as the kind of text says; the truth is one of
its candidates as often, less often after a token that was not its first choice, and scores may be too sure. With a
model and its drafter, drafts are what it proposes while pieces of the file are continued, and the truth is what came.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp.spec.costs import Costs  # noqa: E402
from kdtp.spec.width import Policy  # noqa: E402
from kdtp.text import tokenizer  # noqa: E402
from kdtp.types import GRAPH_ROWS, TILE  # noqa: E402
from scripts.width_drafts import TEXTS, WIDEST, Drafted, of_text, rounds, synthetic  # noqa: E402

BUDGETS = (7, 15, 31, WIDEST)
CONTEXT = 0


def padded(rows: int) -> int:
    """Rows of the graph; beyond the largest, whole ones of it."""
    return next((size for size in GRAPH_ROWS if size >= rows), -(-rows // GRAPH_ROWS[-1]) * GRAPH_ROWS[-1])


def tiles(rows: int) -> int:
    """Rows of whole tiles, as on a CPU."""
    return -(-rows // TILE) * TILE


@dataclass(frozen=True)
class Machine:
    """Milliseconds: of a forward by rows, of a draft by sequences. Source: the design's floors, or
    docs/benchmarks.md."""

    name: str
    forward: dict[int, float]
    draft: dict[int, float]
    padded: Callable[[int], int] = padded

    def seconds(self, rows: int) -> float:
        """Of a forward, as a graph of the next size."""
        return 1e-3 * _straight(self.forward, self.padded(rows))

    def drafting(self, seqs: int) -> float:
        """Seconds of a draft."""
        return 1e-3 * _straight(self.draft, seqs)


def _straight(curve: dict[int, float], size: int) -> float:
    points = sorted(curve.items())
    if len(points) == 1:
        return points[0][1]
    after = next((i for i, (at, _) in enumerate(points) if at >= size), len(points) - 1)
    (x0, y0), (x1, y1) = points[max(after - 1, 0)], points[max(after, 1)]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


MACHINES = (
    Machine("8x RTX PRO 6000, floor, 1k", {1: 6.3, 4: 10.9, 8: 15.2, 16: 22.7, 32: 35.2, 64: 53.6}, {1: 1.2}),
    Machine("8x RTX PRO 6000, floor, 128k", {1: 12.7, 4: 17.2, 8: 21.6, 16: 29.1, 32: 46.9, 64: 77.0}, {1: 1.2}),
    Machine("8x H200, floor, 1k", {1: 2.8, 4: 4.0, 8: 5.5, 16: 8.1, 32: 12.3, 64: 17.4}, {1: 0.6}),
    Machine("8x H200, floor, 128k", {1: 5.0, 4: 6.3, 8: 7.8, 16: 11.1, 32: 18.2, 64: 29.3}, {1: 0.6}),
    Machine("H200, one TP=8 rank as measured, 1k", {1: 4.63, 8: 8.12, 16: 11.5, 32: 17.15, 64: 25.14}, {1: 0.6}),
)
# The pair that ships, on one core: drafts and rows cost nearly what they are many.
CPU = Machine(
    "AMD EPYC, the pair that ships",
    {4: 8.0, 8: 10.6, 16: 13.1, 24: 16.3, 32: 19.0, 48: 25.0, 64: 30.1, 96: 43.3, 128: 53.8},
    {1: 5.0, 2: 8.0, 4: 11.0, 8: 19.0, 16: 36.0, 32: 75.0},
    tiles,
)


def fixed(machine: Machine, drawn: Sequence[Sequence[Drafted]], nodes: int) -> float:
    """Tokens per second with so many nodes for each sequence in every round; 0: plain decoding."""
    tokens = sum(d.tokens(nodes) for batch in drawn for d in batch)
    seqs = len(drawn[0])
    each = machine.seconds(seqs * (1 + nodes)) + (machine.drafting(seqs) if nodes else 0.0)
    return tokens / (each * len(drawn))


def automatic(machine: Machine, drawn: Sequence[Sequence[Drafted]], rng: random.Random) -> tuple[float, float]:
    """Tokens per second, and nodes per sequence and round, of the policy, which starts knowing the curves only."""
    costs = Costs({size: machine.seconds(size) for size in map(machine.padded, GRAPH_ROWS)}, machine.padded)
    drafts = Costs({seqs: machine.drafting(seqs) for seqs in machine.draft}, int, costs)
    policy = Policy(costs, drafts)
    spent = tokens = nodes = 0.0
    for batch in drawn:
        seqs, sizes = len(batch), [0] * len(batch)
        if asked := policy.drafts(seqs):
            took = machine.drafting(asked) * rng.lognormvariate(0.0, 0.05)
            sizes[:asked] = policy.choose([d.grown for d in batch[:asked]], asked, seqs, seqs, seqs, CONTEXT, took)
            accepted = sum(d.tokens(size) - 1 for d, size in zip(batch, sizes, strict=True))
            policy.learn_draft(asked, CONTEXT, took, accepted)
            spent += took
        took = machine.seconds(seqs + sum(sizes)) * rng.lognormvariate(0.0, 0.05)
        policy.learn(seqs, seqs + sum(sizes), CONTEXT, took)
        spent += took
        for d, size in zip(batch, sizes, strict=True):
            tokens += d.tokens(size)
            nodes += size
            if size:
                policy.learn_tree(d.grown.cut(size), frozenset(node for node in d.path if node <= size))
    return tokens / spent, nodes / (len(drawn) * len(drawn[0]))


class Result(NamedTuple):
    """Tokens per second of each way."""

    machine: str
    text: str
    batch: int
    plain: float
    budgets: dict[int, float]
    auto: float
    nodes: float

    @property
    def best(self) -> float:
        """Of the fixed ways, plain decoding too."""
        return max(self.plain, *self.budgets.values())

    def line(self) -> str:
        """Of the table."""
        by_budget = " ".join(f"{rate:7.0f}" for rate in self.budgets.values())
        ends = f"{self.auto:7.0f} {self.nodes:6.1f} {self.auto / self.best:6.2f} {self.auto / self.plain:6.2f}"
        return f"{self.machine:36} {self.text:17} {self.batch:3} {self.plain:7.0f} {by_budget} {ends}"


def results(
    machines: Sequence[Machine], name: str, drawn: Sequence[Sequence[Drafted]], rng: random.Random
) -> Iterator[Result]:
    """Of each machine, the same rounds for all."""
    for machine in machines:
        budgets = {nodes: fixed(machine, drawn, nodes) for nodes in BUDGETS}
        auto, nodes = automatic(machine, drawn, rng)
        yield Result(machine.name, name, len(drawn[0]), fixed(machine, drawn, 0), budgets, auto, nodes)


def texts(chosen: argparse.Namespace, batch: int) -> Iterator[tuple[str, list[list[Drafted]], random.Random]]:
    """Rounds of each kind of text."""
    if chosen.model is not None:
        ids = tokenizer.load(chosen.tokenizer or chosen.model).encode(chosen.text.read_text())
        drafts = of_text(chosen.model, chosen.drafter_model, ids, chosen.prompts, chosen.tokens)
        rng = random.Random(batch)
        yield chosen.text.name, list(rounds(drafts, batch, chosen.rounds, rng)), rng
        return
    for text in TEXTS:
        rng = random.Random(f"{text.name} {batch}")
        drafts = [synthetic(text, rng) for _ in range(chosen.rounds)]
        yield text.name, list(rounds(drafts, batch, chosen.rounds, rng)), rng


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1500, help="of each simulation (default 1500)")
    parser.add_argument("--batch", default="1,4,16,32", help="sequences, e.g. 1,4")
    parser.add_argument("--model", type=Path, help="folder of a model whose drafts are recorded")
    parser.add_argument("--drafter-model", type=Path, help="folder of its DFlash drafter")
    parser.add_argument("--tokenizer", type=Path, help="folder of its tokenizer (default: the model)")
    parser.add_argument("--text", type=Path, help="what it continues pieces of")
    parser.add_argument("--prompts", type=int, default=16, help="pieces (default 16)")
    parser.add_argument("--tokens", type=int, default=128, help="of each continuation (default 128)")
    chosen = parser.parse_args(arguments)
    given = [value is not None for value in (chosen.model, chosen.drafter_model, chosen.text)]
    if any(given) and not all(given):
        parser.error("--model, --drafter-model and --text go together")
    return chosen


def main() -> None:
    chosen = parse()
    heads = " ".join(f"{f'B={nodes}':>7}" for nodes in BUDGETS)
    print(f"{'tokens per second':36} {'text':17} seq   plain {heads}    auto  nodes  /best /plain")
    found = []
    for batch in map(int, chosen.batch.split(",")):
        for name, drawn, rng in texts(chosen, batch):
            for result in results((*MACHINES, CPU), name, drawn, rng):
                print(result.line(), flush=True)
                found.append(result)
    worst = min(r.auto / r.best for r in found), min(r.auto / r.plain for r in found)
    print(f"auto at worst: {worst[0]:.3f} of the best fixed way, {worst[1]:.3f} of plain decoding")


if __name__ == "__main__":
    main()
