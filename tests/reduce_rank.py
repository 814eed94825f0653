"""One rank of the tests of the pushed all-reduce: python -m tests.reduce_rank RANK SIZE BACKEND; it prints JSON.

BACKEND nccl: each rank has a GPU of its own. gloo: all are on the first one, where their kernels take turns; what is
not pushed goes through the CPU.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from kdtp.kernels import cuda
from kdtp.model import push
from kdtp.model.comm import Comm, Gloo, Nccl, sum_in_order
from kdtp.model.layers import Norm

TIMEOUT = 20.0
DEADLINE = 1.5  # seconds to wait for a rank that is gone
WIDTH = 7168
EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float32)
ROWS = (1, 3, 16, 64, 73, 292)  # 14 KB to 4 MB in bfloat16
Way = Callable[[torch.Tensor], torch.Tensor]


class Staged(Gloo):
    """Ranks on one GPU: NCCL would not have them."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return super().all_gather(x.cpu()).to(x.device)


def parts(rows: int, dtype: torch.dtype, seed: int, size: int) -> torch.Tensor:
    """What the ranks hold, [size, rows, WIDTH]: each of them can make it all. The sum depends on the order."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(size, rows, WIDTH, generator=generator, device="cuda")
    return (x * 10 ** torch.randint(-3, 4, x.shape, generator=generator, device="cuda")).to(dtype)


def same(found: torch.Tensor, want: torch.Tensor) -> bool:
    """Bit for bit."""
    return torch.equal(found.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def dawdle(chance: random.Random) -> None:
    """Come late, on the host or on the GPU."""
    time.sleep(chance.choice((0.0, 0.0, 0.002)))
    torch.cuda._sleep(chance.choice((0, 0, 100_000, 1_000_000)))


def want_norm(total: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
    """What all_reduce_norm must leave in the residual, and give."""
    new = residual.clone()
    return new, cuda.rms_norm(total, norm.weight, norm.eps, new)


def eager(comm: Comm, rounds: int) -> dict[str, int]:
    """Calls of all sizes in random order, alike on all ranks, who are late in turn."""
    order, chance = random.Random(3), random.Random(comm.rank)
    norm = Norm(torch.linspace(0.5, 2, WIDTH, device="cuda"), EPS)
    wrong = 0
    for seed in range(rounds):
        rows, dtype, fused = order.choice(ROWS), order.choice(DTYPES), order.random() < 0.5
        x = parts(rows, dtype, seed, comm.size)
        total = sum_in_order(x)
        dawdle(chance)
        if fused:
            residual = parts(rows, dtype, seed + 1_000_000, 1)[0]
            want = want_norm(total, residual, norm)
            found = comm.all_reduce_norm(x[comm.rank], residual, norm)
            wrong += not all(map(same, found, want))
        else:
            wrong += not same(comm.all_reduce(x[comm.rank]), total)
    comm.check()
    return {"rounds": rounds, "wrong": wrong}


def replayed(comm: Comm, rounds: int) -> dict[str, int]:
    """Graphs of an odd number of calls, each with what the one before gave, on new data in each replay; an eager call
    now and then."""
    chance = random.Random(comm.rank)
    norm = Norm(torch.linspace(0.5, 2, WIDTH, device="cuda"), EPS)
    wrong = 0
    for dtype in DTYPES:
        rows = 16
        mine, residual = (torch.zeros(rows, WIDTH, dtype=dtype, device="cuda") for _ in range(2))

        def step(total: Way, add: Callable[..., torch.Tensor], x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            x = add(x, kept, norm)
            return total(add(x, kept, norm))

        def ours(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            return step(comm.all_reduce, lambda *a: comm.all_reduce_norm(*a)[1], x, kept)

        def known(x: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            """The same without the kernel; what ranks have in common after the first sum is known to all."""
            first = cuda.rms_norm(sum_in_order(x), norm.weight, EPS, kept)
            second = cuda.rms_norm(sum_in_order(first.expand(comm.size, -1, -1)), norm.weight, EPS, kept)
            return sum_in_order(second.expand(comm.size, -1, -1))

        ours(mine, residual)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = ours(mine, residual)
        for seed in range(rounds):
            x = parts(rows, dtype, 7000 + seed, comm.size)
            kept = parts(rows, dtype, 9000 + seed, 1)[0]
            mine.copy_(x[comm.rank])
            residual.copy_(kept)
            dawdle(chance)
            graph.replay()
            want = known(x, kept)
            wrong += not (same(out, want) and same(residual, kept))
            if seed % 3 == 0:
                wrong += not same(comm.all_reduce(x[comm.rank]), sum_in_order(x))
    comm.check()
    return {"rounds": rounds * len(DTYPES), "wrong": wrong}


def told(comm: Comm) -> dict[str, object]:
    """How long the calls made so far take to end, and what is said of them."""
    began = time.monotonic()
    torch.cuda.synchronize()
    seconds = time.monotonic() - began
    try:
        comm.check()
    except RuntimeError as error:
        return {"seconds": seconds, "error": str(error)}
    return {"seconds": seconds, "error": None}


def unlike(comm: Comm) -> dict[str, object]:
    """Rank 1 sums another shape than the others."""
    x = torch.ones(2 if comm.rank == 1 else 4, WIDTH, device="cuda")
    for _ in range(20):
        comm.all_reduce(x)
    return told(comm)


def gone(comm: Comm) -> dict[str, object]:
    """Rank 1 has ended."""
    x = torch.ones(4, WIDTH, device="cuda")
    for _ in range(5):
        comm.all_reduce(x)
    torch.cuda.synchronize()
    if comm.rank == 1:
        time.sleep(0.2)  # the others have their sums
        sys.stdout.flush()
        os._exit(0)
    for _ in range(100):
        comm.all_reduce(x)
    return told(comm)


def main() -> None:
    """All of it; `gone` last."""
    rank, size, backend = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.cuda.set_device(rank if backend == "nccl" else 0)
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT))
    base = Nccl() if backend == "nccl" else Staged()
    rounds = 200 if backend == "nccl" else 60  # taking turns takes time
    comm = push.connect(base, TIMEOUT, push.MOST)
    assert isinstance(comm, push.Push), "these GPUs do not map each other's memory"
    tasks: dict[str, Callable[[], object]] = {
        "eager": lambda: eager(comm, rounds),
        "replayed": lambda: replayed(comm, rounds // 3),
        "unlike": lambda: unlike(push.connect(base, TIMEOUT, push.MOST)),
        "gone": lambda: gone(push.connect(base, DEADLINE, push.MOST)),
    }
    if backend == "nccl":  # in graphs, which a CPU cannot take part in
        tasks = {"probed": lambda: push.connect(base, TIMEOUT).most} | tasks  # type: ignore[attr-defined]
    for name, task in tasks.items():
        began = time.monotonic()
        print(json.dumps({"task": name, "found": task(), "took": time.monotonic() - began}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
