"""The step of bench_rank.py on several ranks, each of them one TP=8 rank of Kimi K2.6, that add up what they have.

    none        no collectives: the ranks know nothing of each other
    engine      what the engine does: add and norm with the sum, pushed up to the size that the start-up probe has found
    push+norm   as that, but always pushed;  push, norm: sum and norm as kernels of their own
    gather      NCCL's all_gather and a sum in rank order;  nccl: NCCL's all_reduce, in an order of its own

Each is a CUDA graph; they take turns in a run. Milliseconds of a step, medians, of the rank that takes longest; share:
of the engine's step, what it takes longer than `none`; us each: that by sum.

alike: whether all but nccl give the same bits: on each rank in tokens, logits and residual stream, and on all ranks in
the residual stream, which is all that they share here: each has weights of its own, also of norms and of the head. If
not, who differs. nccl=: whether nccl gives them too; it may, since two numbers have one sum.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from kdtp.model import push
from kdtp.model.comm import Comm
from kdtp.model.layers import Norm
from scripts.gpu_time import about, heading, replays
from scripts.k26 import EPS, Batch, Tensors, tree
from scripts.measure import spread, table
from scripts.rank_model import ALONE, Choice, Rank, Sums, run
from scripts.ranks import everywhere, join, leave, slowest

if TYPE_CHECKING:
    from scripts.bench_rank import Routing, Scope

TURNS, REPLAYS = 8, 5
CONTEXT = 1024
HEADER = ("M", "none", "engine", "share", "us each", "push+norm", "push, norm", "gather", "nccl", "alike", "nccl=")
WAYS = ("none", "engine", "push+norm", "push, norm", "gather", "nccl")
RANKS = "ranks"  # among those who differ
Result = tuple[torch.Tensor, ...]  # of a step: logits, tokens, residual stream


class Kept(Sums):
    """residual: of the last step; what it adds, it adds in place."""

    residual: torch.Tensor

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """Summed."""
        self.residual = self.total(x)
        return self.residual

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks."""
        raise NotImplementedError


class Fused(Kept):
    """The norm goes with the sum where the Comm can."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """As Kept."""
        return self._comm.all_reduce(x)

    def add(self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As Sums, of the sum."""
        return self._comm.all_reduce_norm(delta, residual, Norm(weight, EPS))[1]


class Separate(Fused):
    """First the sum, then the norm."""

    def add(self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As Sums, of the sum."""
        return Sums.add(self, self.total(delta), residual, weight)


class Ring(Kept):
    """NCCL's own all_reduce."""

    def total(self, x: torch.Tensor) -> torch.Tensor:
        """In place."""
        dist.all_reduce(x)
        return x

    def add(self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """As Sums, of the sum."""
        return super().add(self.total(delta), residual, weight)


class Bench:
    """This rank's weights, and the ways to sum."""

    def __init__(self, scope: Scope, layers: int, routing: Routing) -> None:
        self.joined = join()
        self.tensors = Tensors(torch.device("cuda", torch.cuda.current_device()))
        self.layers, self.routing = layers, routing
        self.lacks: dict[str, str] = {}
        self._batches: dict[int, Batch] = {m: tree(self.tensors, m, CONTEXT) for m in scope.rows}
        self._rank = Rank(self.tensors, layers, max(batch.cache_rows for batch in self._batches.values()))

    def ways(self) -> dict[str, Sums]:
        """By name; those of WAYS that there are."""
        base, chosen = self.joined.base, self.joined.chosen
        found: dict[str, Sums] = {"none": ALONE, "engine": Fused(chosen)}
        if isinstance(chosen, push.Push):
            pushed = chosen.up_to(push.MOST)
            found |= {"push+norm": Fused(pushed), "push, norm": Separate(pushed)}
        return found | {"gather": Separate(base), "nccl": Ring()}

    def point(self, rows: int) -> dict[str, Any]:
        """Milliseconds of a step by each way, and whether they agree."""
        choices = self.routing.choices(self.tensors, rows, self.layers)
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        results: dict[str, Result] = {}
        for name, sums in self.ways().items():
            captured, error = everywhere(self.joined.base, lambda sums=sums: self._capture(rows, choices, sums))  # type: ignore[misc]
            if captured is None:
                self.lacks[f"{name}, M = {rows}"] = error
            else:
                graphs[name], results[name] = captured
        samples: dict[str, list[float]] = {name: [] for name in graphs}
        for _ in range(TURNS):
            for name, graph in graphs.items():
                samples[name] += replays(graph, REPLAYS)
        medians = slowest(self.joined.base, [spread(each)["median"] / 1e3 for each in samples.values()])
        results.pop("none", None)
        differ = unlike(self.joined.base, results)
        return {"rows": rows, "ms": dict(zip(graphs, medians, strict=True)), "unlike": differ}

    def _capture(self, rows: int, choices: list[Choice | None], sums: Sums) -> tuple[torch.cuda.CUDAGraph, Result]:
        batch = self._batches[rows]
        self._rank.step(batch, choices, run, sums)  # loads kernels, connects ranks
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            result = self._rank.step(batch, choices, run, sums)
        return graph, (*result, sums.residual) if isinstance(sums, Kept) else result


def unlike(base: Comm, results: Mapping[str, Result]) -> list[str]:
    """The ways that do not give the first one's bits, on any rank, and RANKS if its residual differs among the ranks.

    NaN is never alike. A collective call, of the same ways on all ranks.
    """
    if not results:
        return []
    first = next(iter(results.values()))
    residuals = base.all_gather(first[-1])
    differ = [not all(map(torch.equal, first, each)) for each in results.values()]
    differ.append(not bool((residuals == residuals[0]).all()))
    anywhere = base.all_gather(torch.tensor(differ, dtype=torch.int32, device=residuals.device)).amax(0)
    return [name for name, bad in zip((*results, RANKS), anywhere.tolist(), strict=True) if bad]


def run_rank(scope: Scope, layers: int, routing: Routing, as_json: bool) -> int:
    """One rank; the first one prints."""
    bench = Bench(scope, layers, routing)
    chosen, first = bench.joined.chosen, bench.joined.base.rank == 0
    most = chosen.most if isinstance(chosen, push.Push) else 0
    points = []
    for rows in scope.rows:
        points.append(bench.point(rows))
        if first:
            print(points[-1], file=sys.stderr, flush=True)
    chosen.check()
    head = {"machine": about(), "ranks": bench.joined.base.size, "layers": layers, "routing": str(routing)}
    result = head | {"most": most, "missing": bench.lacks, "points": points}
    if first:
        print(json.dumps(result) if as_json else show(result))
    leave()
    return 0


def show(result: Mapping[str, Any]) -> str:
    """The result as a table, in milliseconds."""
    what = f"K2.6, {result['ranks']} ranks of TP=8 shards, {result['layers']} layers, context {CONTEXT}"
    most = f"the start-up probe pushes up to {result['most'] >> 10} KiB"
    lines = [heading(result["machine"]), f"{what}; routing: {result['routing']}; {most}"]
    lines += [f"no {name}: {why}" for name, why in result["missing"].items()]
    sums = 2 * result["layers"] + 1
    return "\n".join([*lines, "", table(HEADER, [_row(point, sums) for point in result["points"]])])


def _row(point: Mapping[str, Any], sums: int) -> list[object]:
    ms = point["ms"]
    cells = {name: f"{ms[name]:.3f}" if name in ms else "-" for name in WAYS}
    share, each = "-", "-"
    if "none" in ms and "engine" in ms:
        extra = ms["engine"] - ms["none"]
        share, each = f"{extra / ms['engine']:.1%}", f"{1e3 * extra / sums:.1f}"
    before, after = [cells[name] for name in WAYS[:2]], [cells[name] for name in WAYS[2:]]
    others = ", ".join(name for name in point["unlike"] if name != "nccl")
    ring = "-" if "nccl" not in ms else "no" if "nccl" in point["unlike"] else "yes"
    return [point["rows"], *before, share, each, *after, f"NO: {others}" if others else "yes", ring]
