"""Ops of kernels.cuda without a GPU: on CPU tensors they make their structs, and nothing is launched."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from kdtp.kernels import abi, cuda

PARAMS = Path(__file__).resolve().parent.parent / "csrc" / "params.h"


class Paper(abi.Library):
    """Takes the calls of the library; `calls` has the op and struct of each.

    Where the library is built and there is no GPU, it is asked for the size of workspaces, and what it refuses raises
    KernelError: it checks arguments before it fails to launch.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, ctypes.Structure]] = []
        self.checks = abi.LIBRARY.is_file() and not torch.cuda.is_available()
        if self.checks:
            super().__init__()
        else:
            self.structs = abi.structs(PARAMS.read_text())

    def launch(self, op: str, arguments: ctypes.Structure) -> None:
        """Check a struct."""
        self.calls.append((op, arguments))
        if self.checks and getattr(self._lib, f"kdtp_{op}")(ctypes.byref(arguments)) == abi.ILLEGAL:
            raise abi.KernelError(self._lib.kdtp_error().decode())

    def workspace(self, op: str, arguments: ctypes.Structure) -> int:
        """As the library says; KernelError if it refuses."""
        size = super().workspace(op, arguments) if self.checks else 0
        if size < 0:
            raise abi.KernelError(self._lib.kdtp_error().decode())
        return size


@contextmanager
def dry_run() -> Iterator[Paper]:
    """Within it every op of kernels.cuda takes CPU tensors, and what it would launch is on paper."""
    paper = Paper()
    with (
        patch.object(abi, "library", lambda: paper),
        patch.object(cuda, "library", lambda: paper),
        patch.object(cuda, "_stream", lambda: 0),
    ):
        yield paper
