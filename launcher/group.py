"""One group of processes that live and die together: N ranks and, beside them, one lead that directs them.

Spawning ranks is torch.distributed.elastic's (launcher/ranks.py). Watching is ours: elastic polls, and gives a group
that has failed 30 s to end; here an end is noticed at once (pidfd) and the bounds below hold.
"""

from __future__ import annotations

import ctypes
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from launcher.ranks import Ranks  # loaded if there are some

LEAD = -1  # "rank" of the lead
_TELL = 1.5  # seconds for the lead to tell its clients after a rank has ended
_LEAVE = 1.5  # seconds for the others to end by themselves after an orderly end or a signal
_DUMP = 0.8  # seconds for all stacks to be written before SIGKILL
# Of a system call, which glibc has no name for before 2.30; on other machines any thread may take the signal.
_TGKILL = {"x86_64": 234, "aarch64": 131}


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
        self._ranks: Ranks | None = None
        self._processes: dict[int, subprocess.Popen[bytes]] = {}  # that have not ended
        self._pidfds: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        self._signal: int | None = None
        self._ends: list[End] = []

    def start(self) -> None:
        """Spawn the lead and the ranks."""
        os.makedirs(self._scratch, exist_ok=True)
        if self._size:  # before signals are only noted: importing torch takes seconds
            from launcher.ranks import Ranks

            self._ranks = Ranks(self._size)
        self._listen()
        self._watch(LEAD, subprocess.Popen([sys.executable, *self._lead_args], start_new_session=True))
        if self._ranks is not None:
            for rank, process in enumerate(self._ranks.spawn(self._rank_args, self._scratch)):
                self._watch(rank, process)

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
        self._wait(_TELL, lambda: LEAD not in self._processes)  # a rank has ended: the lead must tell its clients
        if self._lead_code() == 0:
            self._wait(_LEAVE, lambda: not self._processes)
        else:
            self._dump()
        self._kill()
        return self._code()

    def _end(self) -> int:
        """An orderly end, the lead first: it has clients to tell."""
        self._signal_all([LEAD], signal.SIGTERM)
        self._wait(_LEAVE, lambda: LEAD not in self._processes)
        told = LEAD not in self._processes
        self._signal_all(sorted(self._processes), signal.SIGTERM)
        self._wait(_DUMP, lambda: not self._processes)
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
        ranks = sorted(self._processes)
        for rank in ranks:
            self._ask_stacks(rank)
            self._signal_all([rank], signal.SIGCONT)
            self._wait(min(0.2, _DUMP / len(ranks)), lambda: not self._processes)

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
            self._reap(key.data)

    def _reap(self, rank: int) -> None:
        process, pidfd = self._processes.pop(rank), self._pidfds.pop(rank)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self._ends.append(End(rank, process.pid, process.wait()))

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self._processes[rank], self._pidfds[rank] = process, os.pidfd_open(process.pid)
        self._selector.register(self._pidfds[rank], selectors.EVENT_READ, rank)

    def _signal_all(self, ranks: Sequence[int], number: int) -> None:
        for rank in ranks:
            if rank in self._pidfds:
                signal.pidfd_send_signal(self._pidfds[rank], number)

    def _ask_stacks(self, rank: int) -> None:
        """Ask the rank's main thread: any thread of a woken process may take what is for the process.

        Another one would read the main thread's stack while that runs, and crash before it has said where it is.
        """
        process, number = self._processes.get(rank), _TGKILL.get(platform.machine())
        if number is None:
            self._signal_all([rank], signal.SIGUSR1)
        elif process is not None:  # ours until it is reaped: nobody else has its pid
            ctypes.CDLL(None).syscall(number, process.pid, process.pid, int(signal.SIGUSR1))

    def _kill(self) -> None:
        self._signal_all(sorted(self._processes), signal.SIGKILL)
        self._wait(2.0, lambda: not self._processes)
        if self._processes:  # stuck in a driver: nobody can end them, and close() would wait for them for ever
            pids = {rank: process.pid for rank, process in self._processes.items()}
            self._say(f"still there after SIGKILL: {pids}")
            return
        if self._ranks is not None:
            self._ranks.close()

    def _on_signal(self, number: int, frame: object) -> None:
        if self._signal is not None:  # the second one is impatient
            self._signal_all(sorted(self._processes), signal.SIGKILL)
        self._signal = number
