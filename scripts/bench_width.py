"""Widths by measured cost against fixed ones, by simulation: recorded times of forwards, synthetic drafts.

    python scripts/bench_width.py [--rounds 1500] [--batch 1,4,16]

For each machine, kind of text and batch: tokens per second of plain decoding, of fixed budgets, and of
kdtp.spec.width.Policy, which sees times with noise and learns as in the engine. The round's time is T(rows) of the
machine plus the draft's. A draft's distributions are as sharp as the kind of text says; the truth is one of its
candidates as often, less often after a token that was not its first choice, and scores may be too sure.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kdtp.proposals import Marginals
from kdtp.spec.tree import Grown, grow
from kdtp.spec.width import Costs, Policy
from kdtp.types import GRAPH_ROWS

DEPTH, TOPK = 7, 16
BUDGETS = (7, 15, 31, 63)
OFF_SPINE = 0.35  # how much less a marginal drafter knows after a token that was not its first choice
CONTEXT = 0


@dataclass(frozen=True)
class Machine:
    """Milliseconds: of a forward by rows, of a draft. Source: the design's floors, or docs/benchmarks.md."""

    name: str
    forward: dict[int, float]
    draft: float

    def seconds(self, rows: int) -> float:
        """Of a forward, as a graph of the next size."""
        size = padded(rows)
        points = sorted(self.forward.items())
        after = next((i for i, (at, _) in enumerate(points) if at >= size), len(points) - 1)
        (x0, y0), (x1, y1) = points[max(after - 1, 0)], points[max(after, 1)]
        return 1e-3 * (y0 + (y1 - y0) * (size - x0) / (x1 - x0))


MACHINES = (
    Machine("8x RTX PRO 6000, floor, 1k", {1: 6.3, 4: 10.9, 8: 15.2, 16: 22.7, 32: 35.2, 64: 53.6}, 1.2),
    Machine("8x RTX PRO 6000, floor, 128k", {1: 12.7, 4: 17.2, 8: 21.6, 16: 29.1, 32: 46.9, 64: 77.0}, 1.2),
    Machine("8x H200, floor, 1k", {1: 2.8, 4: 4.0, 8: 5.5, 16: 8.1, 32: 12.3, 64: 17.4}, 0.6),
    Machine("8x H200, floor, 128k", {1: 5.0, 4: 6.3, 8: 7.8, 16: 11.1, 32: 18.2, 64: 29.3}, 0.6),
    Machine("H200, one TP=8 rank as measured, 1k", {1: 4.63, 8: 8.12, 16: 11.5, 32: 17.15, 64: 25.14}, 0.6),
)


@dataclass(frozen=True)
class Text:
    """hit: chance that the truth is among the candidates of a depth; first: that it is then the first choice; sure:
    above 1, the drafter's probabilities are sharper than the truth's."""

    name: str
    hit: float
    first: float
    sure: float = 1.0


TEXTS = (
    Text("code", 0.95, 0.85),
    Text("prose", 0.7, 0.6),
    Text("prose, too sure", 0.7, 0.6, 2.5),
    Text("not its language", 0.25, 0.4, 1.5),
    Text("noise", 0.02, 0.3, 3.0),
)


class Drafted(NamedTuple):
    """A draft of a sequence: its widest tree, and the nodes of the truth's path, as far as it has them."""

    grown: Grown
    path: list[int]

    def tokens(self, nodes: int) -> int:
        """Emitted in a round that verifies so many nodes."""
        return 1 + sum(node <= nodes for node in self.path)


def padded(rows: int) -> int:
    """Rows of the graph; beyond the largest, whole ones of it."""
    return next((size for size in GRAPH_ROWS if size >= rows), -(-rows // GRAPH_ROWS[-1]) * GRAPH_ROWS[-1])


def drafted(text: Text, rng: random.Random) -> Drafted:
    """A draft: candidate r of each depth has the id r, and the truth is drawn depth by depth."""
    lp, truth, hit = [], [], text.hit
    for _ in range(DEPTH):
        ratio = min(0.95, max(0.05, rng.gauss(1.0 - text.first, 0.1)))
        chance = [(1.0 - ratio) * ratio**r for r in range(TOPK)]
        sharp = [c**text.sure for c in chance]
        left = text.hit * sum(chance)  # the rest of the vocabulary has what the candidates have not
        lp.append([left * s / sum(sharp) for s in sharp])
        rank = rng.choices(range(TOPK), chance)[0] if rng.random() < hit else -1
        truth.append(rank)
        hit = hit if rank == 0 else hit * OFF_SPINE
    grown = grow("tree", Marginals(torch.tensor(lp).log(), torch.arange(TOPK).expand(DEPTH, -1)), 0, BUDGETS[-1], DEPTH)
    return Drafted(grown, list(_walk(grown, truth)))


def _walk(grown: Grown, truth: Sequence[int]) -> Iterator[int]:
    child = {edge: node for node, edge in enumerate(zip(grown.tree.parents, grown.tree.tokens, strict=True))}
    node = 0
    for token in truth:
        if (found := child.get((node, token))) is None:
            return
        node = found
        yield node


def fixed(machine: Machine, rounds: Sequence[Sequence[Drafted]], nodes: int) -> float:
    """Tokens per second with so many nodes for each sequence in every round; 0: plain decoding."""
    tokens = sum(d.tokens(nodes) for batch in rounds for d in batch)
    each = machine.seconds(len(rounds[0]) * (1 + nodes)) + (1e-3 * machine.draft if nodes else 0.0)
    return tokens / (each * len(rounds))


def automatic(machine: Machine, rounds: Sequence[Sequence[Drafted]], rng: random.Random) -> tuple[float, float]:
    """Tokens per second, and nodes per sequence and round, of the policy, which starts knowing the curve only."""
    policy = Policy(Costs({size: machine.seconds(size) for size in GRAPH_ROWS}, padded))
    spent = tokens = nodes = 0.0
    for batch in rounds:
        seqs, sizes = len(batch), [0] * len(batch)
        if policy.drafts(seqs):
            sizes = policy.choose([d.grown for d in batch], seqs, seqs, CONTEXT)
            took = 1e-3 * machine.draft * rng.lognormvariate(0.0, 0.05)
            policy.learn_draft(seqs, took)
            spent += took
        took = machine.seconds(seqs + sum(sizes)) * rng.lognormvariate(0.0, 0.05)
        policy.learn(seqs, seqs + sum(sizes), CONTEXT, took)
        spent += took
        for d, size in zip(batch, sizes, strict=True):
            tokens += d.tokens(size)
            nodes += size
            if size:
                policy.learn_tree(d.grown.cut(size), frozenset(node for node in d.path if node <= size))
    return tokens / spent, nodes / (len(rounds) * len(rounds[0]))


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


def results(machines: Sequence[Machine], texts: Sequence[Text], batches: Sequence[int], count: int) -> Iterator[Result]:
    """All of them, `count` rounds each; the same drafts for all machines."""
    for batch in batches:
        for text in texts:
            rng = random.Random(f"{text.name} {batch}")
            rounds = [[drafted(text, rng) for _ in range(batch)] for _ in range(count)]
            for machine in machines:
                budgets = {nodes: fixed(machine, rounds, nodes) for nodes in BUDGETS}
                auto, nodes = automatic(machine, rounds, rng)
                yield Result(machine.name, text.name, batch, fixed(machine, rounds, 0), budgets, auto, nodes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1500, help="of each simulation (default 1500)")
    parser.add_argument("--batch", default="1,4,16", help="sequences, e.g. 1,4")
    chosen = parser.parse_args()
    batches = [int(part) for part in chosen.batch.split(",")]
    heads = " ".join(f"{f'B={nodes}':>7}" for nodes in BUDGETS)
    print(f"{'tokens per second':36} {'text':17} seq   plain {heads}    auto  nodes  /best /plain")
    found = []
    for result in results(MACHINES, TEXTS, batches, chosen.rounds):
        print(result.line(), flush=True)
        found.append(result)
    worst = min(r.auto / r.best for r in found), min(r.auto / r.plain for r in found)
    print(f"auto at worst: {worst[0]:.3f} of the best fixed way, {worst[1]:.3f} of plain decoding")


if __name__ == "__main__":
    main()
