"""The target's features in memory that rank 0 and the coordinator share: named in a message, never sent.

The memory has no name in any file system, so nothing is left behind, whatever dies: the coordinator opens it through
rank 0's process.
"""

from __future__ import annotations

import mmap
import os

import torch

from kdtp.config import EngineConfig

_SPARE = 8  # rows, for a forward's padding


def rows(config: EngineConfig) -> int:
    """As many as the largest forward has."""
    return config.prefill_chunk + config.max_batch * (1 + config.drafter.budget) + _SPARE


class Shared:
    """Memory of this process that others can map. tensor [rows, width]; fd: names it."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        self.fd = os.memfd_create("kdtp features")
        os.ftruncate(self.fd, rows * width * dtype.itemsize)
        self.tensor = _mapped(self.fd, width, dtype)

    def check(self, features: torch.Tensor | None) -> None:
        """RuntimeError unless these features are here."""
        if features is None or features.data_ptr() != self.tensor.data_ptr():
            count = 0 if features is None else len(features)
            raise RuntimeError(f"{count} rows of features: shared memory is for {len(self.tensor)}")


def opened(pid: int, fd: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The tensor of a `Shared` of process `pid`. OSError if there is none, ValueError if it is of another width."""
    own = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        return _mapped(own, width, dtype)
    finally:
        os.close(own)


def _mapped(fd: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    size = os.fstat(fd).st_size
    if not size or size % (width * dtype.itemsize):
        raise ValueError(f"{size} bytes: no rows of {width} {dtype}")
    return torch.frombuffer(mmap.mmap(fd, size), dtype=dtype).view(-1, width)
