"""An engine as a child process: `kdtp engine`, its private folder, and its end."""

from __future__ import annotations

import json
import subprocess
import sys

from kdtp import log
from kdtp.engine import rundir
from kdtp.engine.plan import Plan
from kdtp.engine.rpc import EngineDead

_END_TIMEOUT = 5.0  # seconds for a group of processes to end; its own bounds are tighter


class Child:
    """A `kdtp engine` process of our own. It ends when our end of its standard input closes, however that comes."""

    def __init__(self, plan: Plan) -> None:
        self._folder = rundir.create()
        self.address = rundir.endpoint(self._folder, "rpc")
        settings = self._folder / rundir.SETTINGS
        settings.write_text(json.dumps(plan.config.mapping()))
        command = [sys.executable, "-m", "kdtp", "engine", "--config", str(settings), "--run-dir", str(self._folder)]
        self._process = subprocess.Popen(
            [*command, "--end-with-stdin", "--log-level", "warning", "--log-format", log.form()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    def check(self) -> None:
        """Raise EngineDead if it has ended."""
        code = self._process.poll()
        if code is not None:
            raise EngineDead(f"the engine's processes ended with code {code}; its log says why")

    def end(self) -> None:
        """Make it end, and wait for that."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_TIMEOUT)

    def tidy(self) -> None:
        """Delete its folder, once nobody uses it."""
        rundir.remove(self._folder)
