"""How much memory the weights of a published model take on a rank. No torch here."""

from __future__ import annotations

import math
import re
from pathlib import Path

from kdtp.model.weights.hf import Checkpoint
from kdtp.model.weights.hf_config import Int4
from kdtp.model.weights.table import Param, parameters

KERNEL_INPUTS = 64  # that the kernel for INT4 takes at a time
_BYTES = {"float32": 4, "bfloat16": 2}


def keeps_int4(device: str, dtype: str) -> bool:
    """Whether INT4 experts stay as they are: only a GPU's kernels read them, and only with bfloat16."""
    return device == "cuda" and dtype == "bfloat16"


def legal_tp(checkpoint: Checkpoint, device: str, dtype: str) -> list[int]:
    """Numbers of ranks the model can be split over; none for INT4 that stays and that the kernel does not take."""
    return checkpoint.legal_tp(KERNEL_INPUTS if keeps_int4(device, dtype) else Int4.GROUP)


def weight_bytes(checkpoint: Checkpoint, rank: int, size: int, device: str, dtype: str) -> int:
    """Bytes of one rank's weights, once loaded."""
    total = 0.0
    for name, param in parameters(checkpoint.model).items():
        int4 = all(checkpoint.form(origin) == "int4" for origin in checkpoint.origins[name])
        each = 0.5 + 2 / Int4.GROUP if int4 and keeps_int4(device, dtype) else _plain(param, dtype)
        total += math.prod(param.held(rank, size)) * each
    return round(total)


def _plain(param: Param, dtype: str) -> int:
    return 4 if param.exact else _BYTES[dtype]


def available_memory() -> int:
    """Bytes of memory that processes of this machine can have without swapping."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024
