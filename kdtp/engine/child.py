"""An engine as a child process: `kdtp engine`, its private folder, and its end."""

from __future__ import annotations

import json
import subprocess
import sys

import zmq

from kdtp import log
from kdtp.engine import rundir
from kdtp.engine.plan import Plan
from kdtp.engine.rpc import Client, EngineDead

_END_TIMEOUT = 5.0  # seconds for a group of processes to end; its own bounds are tighter


class Child:
    """A `kdtp engine` process of our own. It ends when our end of its standard input closes, however that comes.

    ValueError if there is no room for its folder, EngineDead if it cannot be started.
    """

    def __init__(self, plan: Plan) -> None:
        self._folder = rundir.create(json.dumps(plan.config.mapping()))
        self.address = rundir.endpoint(self._folder, "rpc")
        place = ["--config", str(self._folder / rundir.SETTINGS), "--run-dir", str(self._folder)]
        rest = ["--end-with-stdin", "--log-level", "warning", "--log-format", log.form()]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "kdtp", "engine", *place, *rest],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
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
        assert self._process.stdin is not None
        self._process.terminate()  # whoever was forked from this process holds the other end, too
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_TIMEOUT)
        self._process.stdin.close()

    def tidy(self) -> None:
        """Delete its folder, once nobody uses it."""
        rundir.remove(self._folder)
