"""Calls and programs with a deadline that holds whatever hangs in them, in a driver too.

A process that dies while a GPU works for it may be stuck in the kernel, deaf to SIGKILL, and so may one that reads its
/proc. So nobody here waits for an end without a deadline, and all that may be stuck is done by a child.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from typing import NoReturn

import psutil
import pytest

from kdtp.engine import guard

_END, _NOTE = 10.0, 3.0  # seconds for processes to be ended, and for what they do to be noted
_RAISED, _SKIPPED = 1, 2


def run(call: Callable[[], object], seconds: float) -> None:
    """`call` in a child that is forked. What it raises comes as an AssertionError, with its traceback.

    If it is not done in time it is ended, and all processes below it: TimeoutError says what they were doing.
    """
    with tempfile.TemporaryFile("w+") as words:
        child = _fork(lambda: _told(call, words.fileno()))
        code = _code(child, seconds)
        if code is None:
            os.kill(child, signal.SIGUSR1)  # its stacks, to stderr
            _code(_fork(lambda: _end(child, words.fileno())), _END)
            os.kill(child, signal.SIGKILL)
            _code(child, 1.0)
        words.seek(0)
        text = words.read()
    if code is None:
        raise TimeoutError(f"not done within {seconds:g} s; ended:\n{text}")
    if code == _SKIPPED:
        pytest.skip(text)
    if code:
        raise AssertionError(text or f"ended with {code}")


def ask(code: str, seconds: float) -> str:
    """What a Python program prints. AssertionError if it fails; TimeoutError, and nobody waits for it any longer."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=out)
        try:
            assert process.wait(seconds) == 0, f"ended with {process.returncode}: {code}"
        except subprocess.TimeoutExpired:
            process.kill()
            raise TimeoutError(f"not done within {seconds:g} s: {code}") from None
        out.seek(0)
        return out.read()


def _fork(call: Callable[[], int]) -> int:
    """A child that ends with the code that `call` gives, whatever it does."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        return child
    code = _RAISED
    try:
        code = call()
    finally:
        _leave(code)


def _leave(code: int) -> NoReturn:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


def _told(call: Callable[[], object], words: int) -> int:
    guard.end_with_parent(os.getppid())
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__, all_threads=True)
    try:
        call()
    except pytest.skip.Exception as reason:
        os.write(words, str(reason).encode())
        return _SKIPPED
    except BaseException:
        os.write(words, traceback.format_exc().encode())
        return _RAISED
    return 0


def _code(child: int, seconds: float) -> int | None:
    """A child's exit code, negative for a signal; None if it has not ended in time."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    return None


def _end(child: int, words: int) -> int:
    """SIGKILL for a process and all below it, each by its id."""
    time.sleep(0.5)  # for its stacks
    top = psutil.Process(child)
    pids = [top.pid, *(process.pid for process in top.children(recursive=True))]
    _code(_fork(lambda: _note(pids, words)), _NOTE)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return 0


def _note(pids: Sequence[int], words: int) -> int:
    """State of each process, and where in the kernel it waits."""
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/stat") as stat, open(f"/proc/{pid}/wchan") as where:
            name, state = stat.read().partition("(")[2].rpartition(")")[::2]
            os.write(words, f"{pid}: {name}, state {state.split()[0]}, in {where.read() or '?'}\n".encode())
    return 0
