"""The launcher alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from tests.conftest import ROOT

DEAF = """
import signal, sys
from launcher.group import Group

class Deaf(Group):
    def _signal_all(self, ranks, number):
        pass

group = Deaf(["-c", "import signal; signal.pause()"], [], 0, sys.argv[1], lambda line: print(line, flush=True))
group.start()
print(group._pids[-1], flush=True)
group._on_signal(signal.SIGTERM, None)
print(group.run(), flush=True)
"""


def test_a_process_that_cannot_be_ended_is_named_and_not_waited_for(tmp_path):
    """As one that is stuck in a driver: here no signal is sent."""
    began, log = time.monotonic(), tmp_path / "log"
    with log.open("w") as out:  # it is also the sleeper's
        done = subprocess.run([sys.executable, "-c", DEAF, str(tmp_path)], cwd=ROOT, stdout=out, timeout=60)
    pid, *said, code = log.read_text().splitlines()
    os.kill(int(pid), signal.SIGKILL)
    assert (done.returncode, code) == (0, "1"), said
    assert f"still there after SIGKILL: {{-1: {pid}}}" in said
    assert time.monotonic() - began < 30
