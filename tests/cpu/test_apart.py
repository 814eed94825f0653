"""What runs apart: its errors come back, and when it hangs it is ended with all its children, and named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import apart
from tests.processes import until

SLEEPER = "import signal; signal.pause()"


def stuck(note: Path) -> None:
    """With a child in a session of its own, deaf to all that can be ignored."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", SLEEPER], start_new_session=True)
    note.write_text(f"{os.getpid()} {child.pid}")
    time.sleep(60)


def test_what_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=r"not done within 1\.5 s; ended:\n\d+: .*, state S, in ") as error:
        apart.run(lambda: stuck(note), 1.5)
    assert time.monotonic() - began < 40
    pids = [int(word) for word in note.read_text().split()]
    assert all(f"{pid}: " in str(error.value) for pid in pids)
    until(lambda: not any(map(runs, pids)), 5)


def runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_what_it_raises_and_skips_comes_back() -> None:
    here = os.getpid()
    apart.run(lambda: None, 10)
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        apart.run(lambda: 1 // 0, 10)
    with pytest.raises(pytest.skip.Exception, match="no GPU of that kind"):
        apart.run(lambda: pytest.skip("no GPU of that kind"), 10)
    with pytest.raises(AssertionError, match=f"ended with -{signal.SIGKILL:d}"):
        apart.run(lambda: os.kill(os.getpid(), signal.SIGKILL), 10)
    assert os.getpid() == here


def test_a_program_is_asked_with_a_deadline() -> None:
    assert apart.ask("print(6 * 7)", 20) == "42\n"
    with pytest.raises(AssertionError, match="ended with 3"):
        apart.ask("raise SystemExit(3)", 20)
    with pytest.raises(TimeoutError, match=r"not done within 0\.5 s"):
        apart.ask(SLEEPER, 0.5)
