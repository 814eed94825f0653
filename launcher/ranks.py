"""Ranks, spawned by torch.distributed.elastic: one that is started here cannot tell it from torchrun.

It gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and the store behind them is served by this process.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SubprocessContext, start_processes

_LOOPBACK = "127.0.0.1"


class Ranks:
    """`size` ranks on this machine, and the store where they meet."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._store, self._port = loopback_store(size)
        self._context: SubprocessContext | None = None

    def spawn(self, args: tuple[str, ...], scratch: str) -> Sequence[subprocess.Popen[bytes]]:
        """Start all, in rank order. args: after the Python interpreter; scratch: a folder for elastic's error files."""
        each = range(self._size)
        envs = {rank: environment(rank, self._size, self._port) for rank in each}
        context = start_processes("rank", sys.executable, dict.fromkeys(each, args), envs, DefaultLogsSpecs(scratch))
        assert isinstance(context, SubprocessContext)
        self._context = context
        return [context.subprocess_handlers[rank].proc for rank in each]

    def close(self) -> None:
        """Give back what elastic holds. All of them have ended."""
        if self._context is not None:
            self._context.close(signal.SIGKILL, 1)


def loopback_store(size: int) -> tuple[TCPStore, int]:
    """The ranks' rendezvous store on a port of the loopback interface; a plain TCPStore listens on all of them."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((_LOOPBACK, 0))
    listener.listen(1024)
    port = listener.getsockname()[1]
    store = TCPStore(
        _LOOPBACK,
        port,
        None,
        True,
        timeout=timedelta(seconds=10),  # for this process to reach its own store: without files it never does
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, port


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """torchrun's contract, for one machine. gloo and NCCL meet over loopback: nobody else can reach them."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": _LOOPBACK,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RUN_ID": "none",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
