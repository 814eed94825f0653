"""Benchmarks of several ranks: a process for each, on a GPU of its own, started here or by torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from kdtp import log
from kdtp.engine import guard
from kdtp.model import push
from kdtp.model.comm import Comm, Gloo, Nccl

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
_TIMEOUT = 60.0  # seconds of a collective
Made = TypeVar("Made")


class Shared(Gloo):
    """Ranks that share a GPU, which NCCL would not have."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Through the CPU."""
        return super().all_gather(x.cpu()).to(x.device)


class Joined(NamedTuple):
    """A rank among its peers. base: gathers and sums in rank order; chosen: what the engine would use, after its probe;
    alone: whether each rank has a GPU of its own."""

    base: Comm
    chosen: Comm
    alone: bool


def placed() -> bool:
    """Whether this process is a rank already."""
    return "RANK" in os.environ


def start(script: str, size: int, arguments: Sequence[str], seconds: float) -> int:
    """Run the script as `size` ranks; the worst of their exit codes. The ranks are killed after so many seconds."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = os.environ | NO_MULTICAST | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(size)}
    command = [sys.executable, script, *arguments]
    ranks = [subprocess.Popen(command, env=common | {"RANK": str(rank)}) for rank in range(size)]
    try:
        return max(abs(process.wait(seconds)) for process in ranks)
    except subprocess.TimeoutExpired:
        print(f"{script}: ranks that were not done after {seconds:.0f} s were ended", file=sys.stderr)
        return 1
    finally:
        for process in ranks:
            process.kill()
            process.wait()


def join() -> Joined:
    """Connect this rank, which ends with its parent; small messages are pushed where the engine would push them."""
    guard.end_with_parent(os.getppid())
    os.environ |= NO_MULTICAST
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    alone = torch.cuda.device_count() >= size
    log.setup(f"rank {rank}", "info" if rank == 0 else "warning")
    torch.cuda.set_device(rank if alone else 0)
    dist.init_process_group("nccl" if alone else "gloo", timeout=timedelta(seconds=_TIMEOUT))
    base: Comm = Nccl() if alone else Shared()
    return Joined(base, push.connect(base, 20.0, None if alone else push.MOST), alone)


def everywhere(comm: Comm, make: Callable[[], Made]) -> tuple[Made | None, str]:
    """What `make` gives, if it raises on no rank; else None and an error. A collective call."""
    made, error = None, ""
    try:
        made = make()
        torch.cuda.synchronize()
    except Exception as found:
        error = f"{type(found).__name__}: {found}".replace("\n", " ")[:300]
    failed = comm.all_gather(torch.tensor([int(bool(error))], device="cuda")).flatten().nonzero().flatten().tolist()
    return (None, error or f"failed on ranks {failed}") if failed else (made, "")


def slowest(comm: Comm, values: Sequence[float]) -> list[float]:
    """Each figure of the rank that has most of it. A collective call."""
    found: list[float] = comm.all_gather(torch.tensor(values, device="cuda", dtype=torch.float64)).amax(0).tolist()
    return found


def leave() -> None:
    """End this process: torch's teardown may wait for ranks that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
