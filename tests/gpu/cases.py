"""Kernel cases: arguments of one op and what it must give, as the numpy reference or plain numpy has it.

The same cases run through ctypes (tests/gpu/test_cases.py) and, written to a KDTR file by scripts/gen_kernel_cases.py,
through the standalone selftest under compute-sanitizer. A module tests/gpu/cases_<room>.py yields them from `cases()`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from kdtp.model.weights.kdtr import Bf16

Array = np.ndarray | Bf16
F32, BF16 = 0, 1


@dataclass(frozen=True)
class Output:
    """What a pointer field must hold afterwards. atol = rtol = 0: every bit (any NaN equals any NaN).

    `initial` is what it holds before, for in/out fields; others are poisoned. `mask` (bool): entries that count.
    """

    expected: Array
    atol: float = 0.0
    rtol: float = 0.0
    initial: Array | None = None
    mask: np.ndarray | None = None


@dataclass(frozen=True)
class Case:
    """One call of kdtp_<op>. Pointer fields that are neither input nor output are null; `workspace` is provided."""

    name: str
    op: str
    scalars: Mapping[str, int | float]
    inputs: Mapping[str, Array]
    outputs: Mapping[str, Output] = field(default_factory=dict)


def bf16(x: np.ndarray) -> Bf16:
    """float32 rounded to bfloat16, to nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return Bf16(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def f32(x: Array) -> np.ndarray:
    """The float32 values of an array, bfloat16 or not."""
    if isinstance(x, Bf16):
        return (x.bits.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(x, np.float32)


def typed(x: np.ndarray, dtype: int) -> Array:
    """float32 values as the element type of a kernel's `dtype`."""
    return bf16(x) if dtype == BF16 else np.ascontiguousarray(x, np.float32)
