"""Ranks without a launcher, on the CPU: one process imports torch, and each rank is forked from it in milliseconds."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from launcher.ranks import environment, loopback_store

PRELOAD = ["kdtp.engine.worker"]


class Forked:
    """`size` ranks of "-m MODULE ARGUMENTS", with the environment and the store that the launcher gives them."""

    def __init__(self, command: Sequence[str], size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)  # heard by the first of all
        self._store, port = loopback_store(size)
        self._ranks = [
            context.Process(target=_run, args=(command, os.environ | environment(rank, size, port)), daemon=True)
            for rank in range(size)
        ]
        for rank in self._ranks:
            rank.start()

    def poll(self) -> int | None:
        """The exit code of a rank that has ended; None if all run."""
        return next((rank.exitcode for rank in self._ranks if rank.exitcode is not None), None)

    def close(self, seconds: float = 3.0) -> None:
        """Wait so long for all to end, and end those that do not."""
        deadline = time.monotonic() + seconds
        for rank in self._ranks:
            rank.join(max(0.0, deadline - time.monotonic()))
        for rank in self._ranks:
            rank.kill()
            rank.join(5.0)
            rank.close()


def _run(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    os.environ.clear()
    os.environ.update(environment)
    _, module, *arguments = command
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    raise AssertionError(f"{module} came back: a rank ends by itself")
