"""The launcher alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from launcher.group import LEAD, End, Group
from tests.conftest import ROOT
from tests.processes import until

DEAF = """
import signal, sys
from launcher import group as launched
from launcher.group import Group

launched._LEAVE = launched._DUMP = 0.1

class Deaf(Group):
    def _signal_all(self, ranks, number):
        pass

group = Deaf(["-c", "import signal; signal.pause()"], [], 0, sys.argv[1], lambda line: print(line, flush=True))
group.start()
print(group._processes[-1].pid, flush=True)
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


@pytest.mark.parametrize(
    ("codes", "named"),
    [
        ((1, -9), "rank 1 (pid 11) was killed by SIGKILL"),
        ((1, -6), "rank 0 (pid 10) ended with code 1"),
        ((-6,), "SIGABRT"),
    ],
)
def test_who_is_named_is_who_was_killed(codes, named):
    lines = []
    group = Group([], [], 0, "", lines.append)
    group._ends = [*(End(i, 10 + i, code) for i, code in enumerate(codes)), End(LEAD, 9, 70)]
    group._dump()
    assert lines[0].startswith("failed: ") and named in lines[0]


BUSY = """
import faulthandler, signal, threading, time

def aside():
    while True:
        time.sleep(1e-4)

def at_work():
    print("up", flush=True)
    while True:
        pass

faulthandler.register(signal.SIGUSR1)
for _ in range(3):
    threading.Thread(target=aside, daemon=True).start()
at_work()
"""


def test_stacks_of_a_stopped_rank_are_written_by_its_main_thread(tmp_path):
    """Others see its frames while they change: a dump of theirs has crashed the process that was to tell."""
    for i in range(5):
        log = tmp_path / str(i)
        command = [sys.executable, "-c", BUSY]
        with log.open("w") as errors, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as rank:
            rank.stdout.readline()
            rank.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, rank.pid, os.WSTOPPED)
            group = Group([], [], 0, "", lambda line: None)
            group._processes, group._pidfds = {0: rank}, {0: os.pidfd_open(rank.pid)}
            group._ends = [End(LEAD, 9, 70)]
            group._dump()
            until(lambda log=log: log.read_text().endswith("in <module>\n"), 20, "its stacks, the main thread's last")
            rank.kill()
            os.close(group._pidfds[0])
        teller = log.read_text().split("Current thread")[1].split("\n\n")[0]
        assert "in at_work" in teller, teller
