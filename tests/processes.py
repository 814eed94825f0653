"""A real engine of several processes, for tests that treat it badly."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from kdtp.engine.rpc import Client, EngineDead
from kdtp.messages import Status
from tests.paths import REFS, TINY, V3

__all__ = ["REFS", "TINY", "V3", "Running", "collect", "kdtp", "start", "until"]


def until(condition: Callable[[], object], seconds: float, what: str = "condition") -> float:
    """Wait for `condition`; how many seconds it took. AssertionError after `seconds`."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < seconds, f"{what}: not within {seconds} s"
        time.sleep(0.02)
    return time.monotonic() - started


def hears(process: psutil.Process, number: int) -> bool:
    """Whether a signal calls a handler of the process, rather than end it."""
    (caught,) = (line for line in Path(f"/proc/{process.pid}/status").read_text().splitlines() if "SigCgt" in line)
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def start(command: Sequence[object], log: Path) -> subprocess.Popen[str]:
    """A program in a session of its own: without input, its output piped, its errors in `log`."""
    with log.open("w") as errors:
        return subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )


class Running:
    """`kdtp engine` with its coordinator and workers; a context manager that leaves nothing behind.

    program: another one that takes the same flags.
    """

    def __init__(
        self,
        tmp_path: Path,
        *flags: object,
        tp: int = 2,
        model: Path = TINY,
        wait: bool = True,
        program: Sequence[str] = ("-m", "kdtp", "engine"),
    ) -> None:
        self.log = tmp_path / f"engine-{time.monotonic_ns()}.log"
        command = [sys.executable, *program, "--model", model, "--tp", tp, "--threads", 1, *flags]
        self.process = start(command, self.log)
        self.launcher = psutil.Process(self.process.pid)
        self.clients: list[Client] = []
        self.seen: list[psutil.Process] = []
        if wait:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line.startswith("rpc ipc://"), self.text()
            self.address = line.split()[1]
            self.client = self.connect()
            until(lambda: self.client.status(60).state == "ready", 100, "ready")
            self.family()

    def connect(self) -> Client:
        """Another client."""
        self.clients.append(Client(self.address, self.alive))
        return self.clients[-1]

    def alive(self) -> None:
        if self.process.poll() is not None:
            raise EngineDead(f"code {self.process.returncode}")

    def status(self) -> Status:
        return self.client.status(20)

    def family(self) -> list[psutil.Process]:
        """Launcher and all its descendants; remembered for `left`."""
        for process in [self.launcher, *self.launcher.children(recursive=True)]:
            if process not in self.seen:
                self.seen.append(process)
        return self.seen

    def find(self, role: str, rank: int | None = None) -> psutil.Process:
        """The coordinator ("host") or the "worker" of a rank."""
        found = [p for p in self.family() if {"kdtp.engine.start", role} <= set(p.cmdline())]
        if rank is not None:
            found = [p for p in found if p.environ().get("RANK") == str(rank)]
        (process,) = found
        return process

    def left(self) -> list[psutil.Process]:
        """Processes of this engine that still run."""
        return [p for p in self.seen if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def end(self, seconds: float = 20.0) -> int:
        """The exit code, which must come within `seconds`: that nobody waits for ever, on a busy machine either."""
        until(lambda: self.process.poll() is not None, seconds, "exit")
        return self.process.returncode

    def text(self) -> str:
        return self.log.read_text()

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None and error[0] is None and self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        if self.process.poll() is None:
            self.family()
            for process in self.left():
                os.kill(process.pid, signal.SIGKILL)
            self.process.wait(5)
        for client in self.clients:
            client.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        if error[0] is not None:
            print(self.text(), file=sys.stderr)


def collect(client: Client, request: int) -> tuple[list[int], object]:
    """A request's tokens and terminal event."""
    tokens: list[int] = []
    last: object = None
    for message, _ in client.events(request):
        tokens += getattr(message, "tokens", ())
        last = message
    return tokens, last


def kdtp(*flags: object, timeout: float = 100, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    command: Sequence[str] = [sys.executable, "-m", "kdtp", *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd)
