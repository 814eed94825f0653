"""What every process of an engine does first: end with its parent, and never die in silence."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import NoReturn

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Make this process end when process `parent` does, however it dies; at once if it is gone already.

    The kernel's parent-death signal acts also while this process is stuck in C. But it names the parent's *thread*, so
    a thread here watches getppid() too.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.25)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def ending_signals() -> tuple[signal.Signals, ...]:
    """What ends a service in good order. A hangup too, unless it has been ignored from the start, as nohup does."""
    hangup = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    return signal.SIGTERM, signal.SIGINT, *hangup


def leave(code: int) -> NoReturn:
    """End this process now: torch's teardown takes longer than an orderly end should, and may wait for dead peers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def dump_stacks_on_signal() -> None:
    """SIGUSR1 and deadly signals write the Python stacks of all threads to stderr."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)


def exit_on_any_exception() -> None:
    """An exception that nobody caught, in any thread, ends the process with code 1 at once.

    Without this a rank lingers in the teardown of its process group while its peers wait for it.
    """

    def die(kind: type[BaseException], error: BaseException | None, where: TracebackType | None) -> None:
        traceback.print_exception(kind, error, where)
        sys.stderr.flush()
        os._exit(1)

    sys.excepthook = die
    threading.excepthook = lambda args: die(args.exc_type, args.exc_value, args.exc_traceback)
