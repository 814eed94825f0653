"""safetensors files: read memory-mapped, a slice at a time, and written.

A file is 8 bytes (length of the header, little-endian), the header (JSON: per tensor its dtype, shape and place in the
data) and the data. Format: https://github.com/huggingface/safetensors. Everything is checked against the size of the
file before it is used; complaints read `file: where: what: want X, found Y`.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from kdtp.files import distinct, replacing

_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER = 1 << 25  # bytes; Kimi K2.5 would have about that, were all of it in one file
_MOST_DIMS = 8
# By dtype: the numpy type of the stored elements. numpy has neither bfloat16 nor float8: those come as bits.
LAYOUT = {
    "F64": "<f8",
    "F32": "<f4",
    "F16": "<f2",
    "BF16": "<u2",
    "F8_E4M3": "u1",
    "F8_E5M2": "u1",
    "F8_E8M0": "u1",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "i1",
    "U64": "<u8",
    "U32": "<u4",
    "U16": "<u2",
    "U8": "u1",
    "BOOL": "?",
}
Rows = slice | NDArray[np.int64]


class CheckpointError(ValueError):
    """A checkpoint that is not sound, or not what its configuration says; names file, tensor, expected and found."""


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: `offset` and `nbytes` of its data in bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class File:
    """An open file. `tensors` by name, in the file's order. Raises CheckpointError unless the header is sound.

    The file must not be changed while it is open: `read` raises CheckpointError if it was.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map: mmap.mmap | None = _map(path)
        self.size = len(self._map)
        self._state = _state(path)
        self.tensors = _parse(path, self._map)

    def close(self) -> None:
        """Forget the mapping."""
        self._map = None

    def read(self, name: str, rows: Rows = slice(None), columns: slice = slice(None)) -> NDArray[Any]:
        """A copy of some rows, and columns if it has two dimensions, in the numpy type of LAYOUT.

        The pages that were read are given back at once, so that they do not add up.
        """
        assert self._map is not None, f"{self.path}: read after close"
        if _state(self.path) != self._state:  # reading behind the end of a file that was cut would end the process
            raise CheckpointError(f"{self.path}: was changed while it was read")
        stored = self.tensors[name]
        first, size = _pages(stored, rows)
        self._map.madvise(mmap.MADV_WILLNEED, first, size)  # or a cold file comes in by the page
        view: NDArray[Any] = np.ndarray(stored.shape, LAYOUT[stored.dtype], self._map, stored.offset)
        # A slice of whole rows copies at once, an index array and columns row by row; none reads what is not asked for.
        part = view[(rows, columns)[: view.ndim]]
        copy = np.array(part, order="C") if isinstance(rows, slice) else part
        self._map.madvise(mmap.MADV_DONTNEED, first, size)
        return copy


def _pages(stored: Stored, rows: Rows) -> tuple[int, int]:
    """Start and length in the file, from a page's start, of what lies between the first and the last of these rows."""
    if not stored.nbytes:
        return 0, 1
    count = stored.shape[0] if stored.shape else 1
    if isinstance(rows, slice):
        first, last, _ = rows.indices(count)
    else:
        first, last = (int(rows.min()), int(rows.max()) + 1) if rows.size else (0, 0)
    each = stored.nbytes // count
    start = (stored.offset + first * each) // mmap.PAGESIZE * mmap.PAGESIZE
    return start, max(stored.offset + last * each - start, 1)


def _complain(path: Path, where: str, what: str, want: object, found: object) -> NoReturn:
    raise CheckpointError(f"{path}: {where}: {what}: want {want}, found {found}")


def _map(path: Path) -> mmap.mmap:
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            _complain(path, "file", "kind", "a file", "a directory")
        if not stat.S_ISREG(kind):  # opening a pipe would wait for its other end
            _complain(path, "file", "kind", "a file", "none of the regular ones")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < _LENGTH.size:
                _complain(path, "file", "size", f"at least {_LENGTH.size} bytes", size)
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise CheckpointError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def _state(path: Path) -> tuple[int, int, int] | None:
    """What changes with a file; None if it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def _parse(path: Path, data: mmap.mmap) -> dict[str, Stored]:
    (length,) = _LENGTH.unpack_from(data)
    most = min(_LARGEST_HEADER, len(data) - _LENGTH.size)
    if length > most:
        _complain(path, "header", "length", f"at most {most} bytes", length)
    start = _LENGTH.size + length
    try:
        header = json.loads(data[_LENGTH.size : start], object_pairs_hook=distinct)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: header: must be JSON: {error}") from None
    if not isinstance(header, dict):
        _complain(path, "header", "kind", "a JSON object", type(header).__name__)
    header.pop("__metadata__", None)
    tensors = [_tensor(path, name, form, start) for name, form in header.items()]
    _check_places(path, sorted(tensors, key=lambda t: (t.offset, t.nbytes)), start, len(data))
    return {tensor.name: tensor for tensor in tensors}


def _tensor(path: Path, name: str, form: Any, start: int) -> Stored:
    where = f"tensor {name!r}"
    if not isinstance(form, dict) or form.keys() != {"dtype", "shape", "data_offsets"}:
        _complain(path, where, "entry", "dtype, shape and data_offsets", str(form)[:100])
    dtype, shape, place = form["dtype"], form["shape"], form["data_offsets"]
    if not isinstance(dtype, str) or dtype not in LAYOUT:
        _complain(path, where, "dtype", f"one of {', '.join(LAYOUT)}", str(dtype)[:100])
    for what, numbers, count in (("shape", shape, range(_MOST_DIMS + 1)), ("data_offsets", place, (2,))):
        legal = isinstance(numbers, list) and len(numbers) in count and all(type(n) is int and n >= 0 for n in numbers)
        if not legal or any(n >= 1 << 62 for n in numbers):
            _complain(path, where, what, "a few counts", str(numbers)[:100])
    nbytes = math.prod(shape) * np.dtype(LAYOUT[dtype]).itemsize
    if place[1] - place[0] != nbytes:
        _complain(path, where, "bytes", f"{nbytes} for {dtype} {shape}", place[1] - place[0])
    return Stored(name, dtype, tuple(shape), start + place[0], nbytes)


def _check_places(path: Path, tensors: list[Stored], start: int, size: int) -> None:
    """They follow one another without gap or overlap, and fill the file."""
    end = start
    for tensor in tensors:
        where = f"tensor {tensor.name!r}"
        if tensor.offset != end:
            _complain(path, where, "start of the data", f"byte {end}", tensor.offset)
        end += tensor.nbytes
        if end > size:
            _complain(path, where, "end of the data (is the file cut off?)", f"by byte {size}", end)
    if end != size:
        _complain(path, "file", "size", f"{end} bytes", size)


def write(path: Path, tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> None:
    """Write a file of named tensors, each a dtype and an array of its numpy type in LAYOUT; all of it or nothing."""
    with replacing(path) as file:
        for chunk in _chunks(tensors):
            file.write(chunk)


def _chunks(tensors: Mapping[str, tuple[str, NDArray[Any]]]) -> Iterator[bytes | memoryview]:
    header, end = {}, 0
    arrays = {name: np.ascontiguousarray(array, LAYOUT[dtype]) for name, (dtype, array) in tensors.items()}
    for name, array in arrays.items():
        shape = list(tensors[name][1].shape)
        header[name] = {"dtype": tensors[name][0], "shape": shape, "data_offsets": [end, end + array.nbytes]}
        end += array.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield _LENGTH.pack(len(text)) + text
    for array in arrays.values():
        yield array.reshape(-1).view(np.uint8).data
