"""One group of processes that live and die together: N ranks and, beside them, one lead that directs them.

Spawning is torch.distributed.elastic's, so a rank started here cannot tell it from torchrun: it gets RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR and MASTER_PORT, and the store behind them is served by this process. Watching is ours: elastic
polls, and gives a group that has failed 30 s to end; here an end is noticed at once (pidfd) and the bounds below hold.
"""

from __future__ import annotations

import ctypes
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, SubprocessContext, start_processes

LEAD = -1  # "rank" of the lead
_TELL = 1.5  # seconds for the lead to tell its clients after a rank has ended
_LEAVE = 1.5  # seconds for the others to end by themselves after an orderly end or a signal
_DUMP = 0.8  # seconds for all stacks to be written before SIGKILL
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class End:
    """A process that has ended: `code` is its exit code, negative for a signal."""

    rank: int
    pid: int
    code: int

    def __str__(self) -> str:
        name = "the lead" if self.rank == LEAD else f"rank {self.rank}"
        how = f"was killed by {signal.Signals(-self.code).name}" if self.code < 0 else f"ended with code {self.code}"
        return f"{name} (pid {self.pid}) {how}"


class Group:
    """`start` spawns, `run` watches until all have ended and returns the exit code of the whole.

    lead, ranks: arguments after the Python interpreter; size: number of ranks, 0 for none; scratch: a folder for
    elastic's error files; say: gets one line for each thing that happens.
    """

    def __init__(
        self, lead: Sequence[str], ranks: Sequence[str], size: int, scratch: str, say: Callable[[str], None]
    ) -> None:
        self._lead_args = tuple(lead)
        self._rank_args = tuple(ranks)
        self._size = size
        self._scratch = scratch
        self._say = say
        self._contexts: list[PContext] = []
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._signal: int | None = None
        self._ends: list[End] = []

    def start(self) -> None:
        """Spawn the lead and the ranks."""
        os.makedirs(self._scratch, exist_ok=True)
        self._listen()
        self._store, port = _loopback_store(self._size)
        self._spawn("lead", self._lead_args, {LEAD: {}})
        if self._size:
            self._spawn("rank", self._rank_args, {i: _environment(i, self._size, port) for i in range(self._size)})

    def _listen(self) -> None:
        """Signals are noted and wake the selector. Elastic would install handlers that raise: it gets SIGQUIT alone."""
        os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
        self._wakeup, self._wakeup_send = socket.socketpair()
        for end in (self._wakeup, self._wakeup_send):
            end.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        signal.set_wakeup_fd(self._wakeup_send.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup's wish
                signal.signal(number, self._on_signal)

    def run(self) -> int:
        """Wait for the end, see to it that nothing is left, and return the exit code: 0 for an orderly end."""
        self._wait(None, lambda: bool(self._ends) or self._signal is not None)
        if self._signal is not None:
            return self._end()
        self._wait(_TELL, lambda: LEAD not in self._pids)  # a rank has ended: the lead must tell its clients
        if self._lead_code() == 0:
            self._wait(_LEAVE, lambda: not self._pids)
        else:
            self._dump()
        self._kill()
        return self._code()

    def _end(self) -> int:
        """An orderly end, the lead first: it has clients to tell."""
        self._signal_all([LEAD], signal.SIGTERM)
        self._wait(_LEAVE, lambda: LEAD not in self._pids)
        told = LEAD not in self._pids
        self._signal_all(sorted(self._pids), signal.SIGTERM)
        self._wait(_DUMP, lambda: not self._pids)
        self._kill()
        if not told:
            self._say(f"the lead did not end within {_LEAVE} s; its clients may not have been told")
        return 0 if told else 1

    def _dump(self) -> None:
        """Say what ended first, and let those still there write their stacks to the log."""
        # A peer that fails for a killed one may be gone before the kernel is done with that: its end is seen first. An
        # abort may be such a failure.
        killed = (end for end in self._ends if end.code < 0 and end.code != -signal.SIGABRT)
        self._say(f"failed: {next(killed, self._ends[0])}")
        # One after the other, for they share the log. A stopped process is woken after it has been asked, so that the
        # first thing it does is to say where it was.
        ranks = sorted(self._pids)
        for rank in ranks:
            self._ask_stacks(rank)
            self._signal_all([rank], signal.SIGCONT)
            self._wait(min(0.2, _DUMP / len(ranks)), lambda: not self._pids)

    def _lead_code(self) -> int | None:
        return next((end.code for end in self._ends if end.rank == LEAD), None)

    def _code(self) -> int:
        code = self._lead_code()
        return code if code is not None and code >= 0 else 1

    def _wait(self, seconds: float | None, done: Callable[[], bool]) -> None:
        """Note the ends of processes until `done` or for `seconds`."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not done():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return
            for key, _ in self._selector.select(left):
                self._note(key)

    def _note(self, key: selectors.SelectorKey) -> None:
        if key.fileobj is self._wakeup:
            self._wakeup.recv(64)
        else:
            self._reap(key.data.rank)

    def _reap(self, rank: int) -> None:
        pid, pidfd = self._pids.pop(rank), self._pidfds.pop(rank)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        context = self._contexts[0] if rank == LEAD else self._contexts[1]
        assert isinstance(context, SubprocessContext)
        code = context.subprocess_handlers[max(rank, 0)].proc.wait()
        self._ends.append(End(rank, pid, code))

    def _spawn(self, name: str, args: tuple[str, ...], envs: dict[int, dict[str, str]]) -> None:
        """A process for each rank of `envs`."""
        each = dict(enumerate(envs.values()))
        context = start_processes(
            name, sys.executable, dict.fromkeys(each, args), each, DefaultLogsSpecs(self._scratch)
        )
        self._contexts.append(context)
        for local, rank in enumerate(envs):
            pid = context.pids()[local]
            self._pids[rank], self._pidfds[rank] = pid, os.pidfd_open(pid)
            self._selector.register(self._pidfds[rank], selectors.EVENT_READ, End(rank, pid, 0))

    def _signal_all(self, ranks: Sequence[int], number: int) -> None:
        for rank in ranks:
            if rank in self._pidfds:
                signal.pidfd_send_signal(self._pidfds[rank], number)

    def _ask_stacks(self, rank: int) -> None:
        """Ask the rank's main thread: any thread of a woken process may take what is for the process.

        Another one would read the main thread's stack while that runs, and crash before it has said where it is.
        """
        pid = self._pids.get(rank)
        if pid is not None:  # ours until it is reaped: nobody else has the number
            ctypes.CDLL(None).tgkill(pid, pid, int(signal.SIGUSR1))

    def _kill(self) -> None:
        self._signal_all(sorted(self._pids), signal.SIGKILL)
        self._wait(2.0, lambda: not self._pids)
        if self._pids:  # stuck in a driver: nobody can end them, and close() would wait for them for ever
            self._say(f"still there after SIGKILL: {self._pids}")
            return
        for context in self._contexts:
            context.close(signal.SIGKILL, 1)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._signal is not None:  # the second one is impatient
            self._signal_all(sorted(self._pids), signal.SIGKILL)
        self._signal = number


def _loopback_store(size: int) -> tuple[TCPStore | None, int]:
    """The ranks' rendezvous store on a port of the loopback interface; a plain TCPStore listens on all of them."""
    if size == 0:
        return None, 0
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


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
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
