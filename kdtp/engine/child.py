"""An engine as a child process: `kdtp engine`, its private folder, and its end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence

import zmq

from kdtp import log
from kdtp.engine import rundir
from kdtp.engine.plan import Plan
from kdtp.engine.rpc import Client, EngineDead

_END_TIMEOUT = 5.0  # seconds for a group of processes to end; its own bounds are tighter


class Child:
    """A `kdtp engine` process of our own. It ends when this process does, however that comes, or runs another program.

    What is forked from this process has no part in it: it neither keeps it alive nor ends it. ValueError if there is no
    room for its folder, EngineDead if it cannot be started.
    """

    def __init__(self, plan: Plan) -> None:
        self._owner = os.getpid()
        self._folder = rundir.create(json.dumps(plan.config.mapping()))
        self.address = rundir.endpoint(self._folder, "rpc")
        place = ["--config", str(self._folder / rundir.SETTINGS), "--run-dir", str(self._folder)]
        try:
            self._process = _start([*place, "--log-level", "warning", "--log-format", log.form()])
        except OSError as error:
            rundir.remove(self._folder)
            raise EngineDead(f"the engine could not be started: {error.strerror}") from None

    def client(self, silence: float = 60.0, wake: int | None = None) -> Client:
        """A client of it, as rpc.Client. EngineDead, and the child is ended, where there is no room for a socket."""
        try:
            return Client(self.address, self.check, silence, wake)
        except zmq.ZMQError as error:
            self.end()
            self.tidy()
            raise EngineDead(f"no way to the engine: {error}") from None

    def check(self) -> None:
        """Raise EngineDead if it has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineDead(f"the engine's processes ended with code {code}; its log says why")

    def end(self) -> None:
        """Make it end, and wait for that."""
        if os.getpid() != self._owner:
            return
        assert self._process.stdin is not None
        self._process.terminate()
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_TIMEOUT)
        self._process.stdin.close()

    def tidy(self) -> None:
        """Delete its folder, once nobody uses it."""
        if os.getpid() == self._owner:
            rundir.remove(self._folder)


def _start(flags: Sequence[str]) -> subprocess.Popen[bytes]:
    """It ends with its input, and with this process: what is forked from that holds the input's other end, too."""
    owner = os.pidfd_open(os.getpid())
    ends = ["--end-with-stdin", "--end-with-pidfd", str(owner)]
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "kdtp", "engine", *ends, *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[owner],
            start_new_session=True,
        )
    finally:
        os.close(owner)
