"""Measure all-reduces of M x 7168 bfloat16 between the GPUs of this machine, by every way there is.

    python scripts/bench_allreduce.py [--ranks N] [--json]        # starts a process per GPU
    torchrun --nproc-per-node N scripts/bench_allreduce.py [--json]

    nccl        NCCL's all_reduce, whose order of summation is its own
    gather      NCCL's all_gather, and the sum in rank order: what kdtp does above the crossover
    push        kdtp's kernel, of the same bits as `gather`
    push, norm  the same, then add + RMSNorm as a kernel of its own
    push+norm   both in one kernel
    1-shot, 2-shot  torch's symmetric memory

Microseconds per call, medians, of the rank that takes longest: in a graph of 20 calls, and eager, 20 calls queued. With
fewer GPUs than ranks all share the first one and take turns: such figures say nothing but that it works. NVLink
multicast is off.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

from kdtp import log  # noqa: E402
from kdtp.kernels import cuda  # noqa: E402
from kdtp.model import push  # noqa: E402
from kdtp.model.comm import Comm, Gloo, Nccl  # noqa: E402
from kdtp.model.layers import Norm  # noqa: E402
from scripts.gpu_time import about, heading, missing, run_all  # noqa: E402
from scripts.measure import spread, table  # noqa: E402

WIDTH = 7168
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 146, 292)  # 14 KB to 4 MB
CALLS, TIMES = 20, 15
QUICK = (1, 16, 64), 3  # rows and times of ranks that share a GPU
Ways = dict[str, Callable[[], object]]


class Shared(Gloo):
    """Ranks that share a GPU, which NCCL would not have."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Through the CPU."""
        return super().all_gather(x.cpu()).to(x.device)


class Bench:
    """One rank."""

    def __init__(self, comm: push.Push, alone: bool) -> None:
        self._comm, self._alone = comm, alone
        self._rows, self._times = (ROWS, TIMES) if alone else QUICK
        self._norm = Norm(torch.ones(WIDTH, device="cuda"), 1e-5)
        self._lacks: dict[str, str] = {}

    def measure(self) -> dict[str, Any]:
        """All sizes, as plain values; {way: [graph, eager]} of each."""
        points = [{"rows": rows, "ways": self._point(rows)} for rows in self._rows]
        return {"ranks": self._comm.size, "own_gpus": self._alone, "missing": self._lacks, "points": points}

    def _point(self, rows: int) -> dict[str, list[float]]:
        x = torch.randn(rows, WIDTH, device="cuda").to(torch.bfloat16)
        ways = self._pushed(x) | (self._nccl(x) | self._symmetric(x) if self._alone else {})
        return {name: self._slowest(call) for name, call in ways.items()}

    def _pushed(self, x: torch.Tensor) -> Ways:
        if x.nbytes > push.MOST:
            return {}
        comm, norm, residual = self._comm, self._norm, torch.zeros_like(x)
        return {
            "push": lambda: comm.all_reduce(x),
            "push, norm": lambda: cuda.rms_norm(comm.all_reduce(x), norm.weight, norm.eps, residual),
            "push+norm": lambda: comm.all_reduce_norm(x, residual, norm),
        }

    def _nccl(self, x: torch.Tensor) -> Ways:
        base, y = Nccl(), x.clone()
        return {"nccl": lambda: dist.all_reduce(y), "gather": lambda: base.all_reduce(x)}

    def _symmetric(self, x: torch.Tensor) -> Ways:
        try:
            import torch.distributed._symmetric_memory as symmetric

            group = dist.group.WORLD
            y = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
            symmetric.rendezvous(y, group)
            ops, name = torch.ops.symm_mem, group.group_name
            ops.one_shot_all_reduce(y, "sum", name)
        except Exception as error:
            self._lacks["symmetric memory"] = f"{type(error).__name__}: {error}"[:300]
            return {}
        return {
            "1-shot": lambda: ops.one_shot_all_reduce(y, "sum", name),
            "2-shot": lambda: ops.two_shot_all_reduce_(y, "sum", name),
        }

    def _slowest(self, call: Callable[[], object]) -> list[float]:
        """Microseconds in a graph and eager, on the rank that takes longest."""
        calls = [call] * CALLS
        run_all(calls[:2])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            run_all(calls)
        mine = [_microseconds(way, self._times) for way in (graph.replay, lambda: run_all(calls))]
        found: list[float] = self._comm.all_gather(torch.tensor(mine, device="cuda")).amax(0).tolist()
        return found


def _microseconds(calls: Callable[[], object], times: int) -> float:
    """Of one of CALLS calls, on the GPU."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    samples = []
    for _ in range(2 + times):
        torch.cuda.synchronize()
        events[0].record()
        calls()
        events[1].record()
        torch.cuda.synchronize()
        samples.append(1e3 * events[0].elapsed_time(events[1]) / CALLS)
    return spread(samples[2:])["median"]


def show(result: Mapping[str, Any]) -> str:
    """The result as two tables."""
    note = "" if result["own_gpus"] else "; ALL ON ONE GPU, TAKING TURNS: not a measurement"
    lines = [heading(result["machine"]), f"{result['ranks']} ranks{note}; pushed up to {result['most'] >> 10} KiB"]
    lines += [f"no {what}: {why}" for what, why in result["missing"].items()]
    names = list(dict.fromkeys(name for point in result["points"] for name in point["ways"]))
    for kind, title in enumerate(("in a graph, us", "eager, us")):
        rows = [_row(point, names, kind) for point in result["points"]]
        lines += ["", table([title, "KiB", *names], rows)]
    return "\n".join(lines)


def _row(point: Mapping[str, Any], names: Sequence[str], kind: int) -> list[object]:
    cells = [f"{point['ways'][name][kind]:.1f}" if name in point["ways"] else "-" for name in names]
    return [f"M = {point['rows']}", point["rows"] * WIDTH * 2 // 1024, *cells]


def rank_of(rank: int, size: int, as_json: bool) -> None:
    """One rank; the first one prints."""
    alone = torch.cuda.device_count() >= size
    log.setup(f"rank {rank}", "info" if rank == 0 else "warning")
    torch.cuda.set_device(rank if alone else 0)
    dist.init_process_group("nccl" if alone else "gloo", timeout=timedelta(seconds=60))
    base: Comm = Nccl() if alone else Shared()
    chosen = push.connect(base, 20.0) if alone else push.connect(base, 20.0, push.MOST)
    if not isinstance(chosen, push.Push):
        sys.exit("bench_allreduce: these GPUs do not map each other's memory")
    most, chosen.most = chosen.most, push.MOST
    result = {"machine": about(), "most": most} | Bench(chosen, alone).measure()
    chosen.check()
    if rank == 0:
        print(json.dumps(result) if as_json else show(result), flush=True)
    os._exit(0)


def start(size: int, arguments: Sequence[str]) -> int:
    """A process per rank; the worst of their exit codes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    command = [sys.executable, __file__, *arguments]
    ranks = [subprocess.Popen(command, env=common | {"RANK": str(rank)}) for rank in range(size)]
    try:
        return max(abs(process.wait(300)) for process in ranks)
    finally:
        for process in ranks:
            process.kill()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=0, help="default: as many as there are GPUs, at least 2")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    chosen = parser.parse_args()
    if lack := missing():
        sys.exit(f"bench_allreduce: {lack}")
    if "RANK" in os.environ:
        rank_of(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), chosen.json)
    sys.exit(start(chosen.ranks or max(2, torch.cuda.device_count()), sys.argv[1:]))


if __name__ == "__main__":
    main()
