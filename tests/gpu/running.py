"""Runs one kernel case on the GPU and says what is wrong with what it left there."""

from __future__ import annotations

import ctypes

import numpy as np
import torch

from kdtp.kernels.abi import KernelError, library
from kdtp.model.weights.kdtr import Bf16
from tests.gpu.cases import Array, Case, Output, f32
from tests.gpu.rooms import check_fields

GUARD = 256  # bytes on either side of a buffer; the data between them stays aligned to as many
POISON = 0xFF  # each byte of guards, outputs and workspaces: NaN as a float or bfloat16, -1 as an integer


class Buffer:
    """Bytes on the GPU between two guards: what a kernel reads beyond its array is NaN, what it writes there shows."""

    def __init__(self, data: np.ndarray) -> None:
        guard = np.full(GUARD, POISON, np.uint8)
        self._before = torch.from_numpy(np.concatenate([guard, data, guard]))
        self._device = self._before.cuda()

    @property
    def address(self) -> int:
        """Where the data starts, on the GPU."""
        return self._device.data_ptr() + GUARD

    def restore(self) -> None:
        """Put back what was there at first."""
        self._device.copy_(self._before)

    def read(self) -> np.ndarray:
        """The data as it is now, uint8."""
        return self._device[GUARD:-GUARD].cpu().numpy()

    def damage(self, may_change: bool) -> str | None:
        """What was written that must not be: a guard, or anything at all of an input."""
        written = (self._device.cpu() != self._before).numpy()
        if may_change:
            written[GUARD:-GUARD] = False
        at = np.flatnonzero(written) - GUARD
        return f"{len(at)} bytes overwritten, from byte {at[0]} of {len(written) - 2 * GUARD}" if len(at) else None


def complaints(case: Case) -> list[str]:
    """What is wrong with `case`, one line each: refusals, wrong values, bytes out of bounds, an unlike second run."""
    inputs = {name: Buffer(raw(array)) for name, array in case.inputs.items()}
    outputs = {name: Buffer(before(output)) for name, output in case.outputs.items()}
    arguments = arguments_of(case, inputs | outputs)
    workspace = provide_workspace(case.op, arguments)
    try:
        first, second = (run(case.op, arguments, outputs) for _ in range(2))
    except KernelError as error:
        return [str(error)]
    found = {name: difference(output, first[name]) for name, output in case.outputs.items()}
    found |= {f"second run of {name}": unlike(first[name], second[name]) for name in outputs}
    found |= {f"input {name}": buffer.damage(may_change=False) for name, buffer in inputs.items()}
    found |= {f"around {name}": buffer.damage(may_change=True) for name, buffer in (outputs | workspace).items()}
    return [f"{name}: {text}" for name, text in found.items() if text]


def raw(array: Array) -> np.ndarray:
    """The bytes of an array."""
    return np.ascontiguousarray(bits(array)).reshape(-1).view(np.uint8)


def bits(array: Array) -> np.ndarray:
    """The array; of bfloat16 its patterns."""
    return array.bits if isinstance(array, Bf16) else array


def before(output: Output) -> np.ndarray:
    """The bytes an output holds before the call."""
    return np.full_like(raw(output.expected), POISON) if output.initial is None else raw(output.initial)


def arguments_of(case: Case, buffers: dict[str, Buffer]) -> ctypes.Structure:
    """The op's struct for torch's current stream; the workspace is not in it yet. Raises ValueError as check_fields."""
    struct = library().structs[case.op]
    check_fields(case, struct)
    arguments = struct(stream=torch.cuda.current_stream().cuda_stream, **case.scalars)
    for name, buffer in buffers.items():
        setattr(arguments, name, buffer.address)
    return arguments


def provide_workspace(op: str, arguments: ctypes.Structure) -> dict[str, Buffer]:
    """Poisoned memory of the size that the library asks for, if the op has a workspace at all; it is in use as long as
    the result is held."""
    if not hasattr(arguments, "workspace"):
        return {}
    size = library().workspace(op, arguments)
    buffer = Buffer(np.full(size, POISON, np.uint8))
    arguments.workspace, arguments.workspace_bytes = buffer.address, size
    return {"workspace": buffer}


def run(op: str, arguments: ctypes.Structure, outputs: dict[str, Buffer]) -> dict[str, np.ndarray]:
    """The outputs' bytes after one call. The workspace is left as it is: a second call meets what the first left."""
    for buffer in outputs.values():
        buffer.restore()
    library().launch(op, arguments)
    torch.cuda.synchronize()
    return {name: buffer.read() for name, buffer in outputs.items()}


def difference(output: Output, data: np.ndarray) -> str | None:
    """Where `data` is not what the output must hold: how many elements, and the worst by its coordinates."""
    want_bits = bits(output.expected)
    found_bits = data.view(want_bits.dtype).reshape(want_bits.shape)
    found = f32(Bf16(found_bits)) if isinstance(output.expected, Bf16) else found_bits
    want = f32(output.expected) if isinstance(output.expected, Bf16) else want_bits
    wrong = ~agree(output, found, want, found_bits, want_bits)
    if output.mask is not None:
        wrong &= output.mask
    if not wrong.any():
        return None
    with np.errstate(invalid="ignore"):
        distance = np.nan_to_num(np.abs(found.astype(np.float64) - want), nan=np.inf)
    at = np.unravel_index(np.where(wrong, distance, -1.0).argmax(), wrong.shape)
    tolerance = f"atol {output.atol:g}, rtol {output.rtol:g}"
    where = ", ".join(map(str, at))
    return f"{wrong.sum()} of {wrong.size} wrong, worst at [{where}]: found {found[at]}, want {want[at]} ({tolerance})"


def agree(
    output: Output, found: np.ndarray, want: np.ndarray, found_bits: np.ndarray, want_bits: np.ndarray
) -> np.ndarray:
    """bool: the elements that are as they must be. NaN agrees with NaN, infinity with itself only."""
    pattern = f"u{want_bits.itemsize}"
    same = found_bits.view(pattern) == np.ascontiguousarray(want_bits).view(pattern)
    if want.dtype.kind == "f":
        same |= np.isnan(found) & np.isnan(want)
    if output.atol == output.rtol == 0.0:
        return same
    with np.errstate(invalid="ignore"):
        wide = want.astype(np.float64)
        near = np.abs(found - wide) <= output.atol + output.rtol * np.abs(wide)
    return same | (near & np.isfinite(wide))


def unlike(first: np.ndarray, second: np.ndarray) -> str | None:
    """Where two runs differ."""
    at = np.flatnonzero(first != second)
    return f"{len(at)} bytes differ, from byte {at[0]} of {len(first)}" if len(at) else None
