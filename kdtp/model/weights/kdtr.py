"""KDTR files: named arrays and metadata, shared by Python and C. docs/kdtr.md gives the bytes.

A file must not be changed in place while it is open, since its arrays are views of the mapped file; `write` replaces
it as a whole, which readers of the old one do not notice.
"""

from __future__ import annotations

import mmap
import os
import stat
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdtp import files
from kdtp.model.weights.kdtr_table import FIXED, LAYOUT, MAX_DIMS, Bf16, Entry, KdtrError, Value, complain, pack, parse

__all__ = ["Bf16", "Entry", "KdtrError", "Reader", "Value", "write"]


class Reader:
    """A KDTR file, memory-mapped. Header and table are checked here, an array's checksum when it is first used.

    metadata: the file's values by key, entries: its arrays by name, both in the file's order.
    Raises KdtrError for a file that is not sound, OSError for one that cannot be read.
    """

    path: Path
    metadata: dict[str, Value]
    entries: dict[str, Entry]

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if self.path.suffix == ".safetensors":
            raise KdtrError(f"{self.path}: want a KDTR file, found a shard of a model folder: give the folder")
        self._map: mmap.mmap | None = _map(self.path)
        self._verified: set[str] = set()
        self.metadata, self.entries = parse(self.path, self._map)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the mapping; it goes away with the last array taken from it."""
        self._map = None

    def array(self, name: str) -> NDArray[Any]:
        """A read-only view of the file, 64-byte aligned; a bfloat16 array comes as its uint16 bits.

        Raises KdtrError when the file has no such array or its data is damaged.
        """
        if self._map is None:
            raise ValueError(f"{self.path}: array {name!r} asked of a closed reader")
        if name not in self.entries:
            raise KdtrError(f"{self.path}: has no array {name!r}")
        entry = self.entries[name]
        view: NDArray[Any] = np.ndarray(entry.shape, LAYOUT[entry.dtype][1], self._map, entry.offset)
        if name not in self._verified:
            self._verify(entry, _bytes_of(view))
            self._verified.add(name)
        return view

    def verify(self) -> None:
        """Check the data of every array; raises KdtrError at the first that is damaged."""
        for name in self.entries:
            self.array(name)

    def _verify(self, entry: Entry, data: NDArray[np.uint8]) -> None:
        where = f"array '{entry.name}'"
        if (found := zlib.crc32(data.data)) != entry.crc32:
            complain(self.path, where, "crc32", f"0x{entry.crc32:08x}", f"0x{found:08x}")
        if entry.dtype == "bool" and data.size and (most := int(data.max())) > 1:
            complain(self.path, where, "bool", "bytes 0 and 1", most)


def _map(path: Path) -> mmap.mmap:
    if not stat.S_ISREG(path.stat().st_mode):  # asked first: opening a pipe would wait for its other end
        raise KdtrError(f"{path}: not a regular file")
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < FIXED.size:
            complain(path, "file", "size", f"at least {FIXED.size} bytes", size)
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)


def _bytes_of(array: NDArray[Any]) -> NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)


def write(
    path: str | os.PathLike[str], metadata: Mapping[str, Value], arrays: Mapping[str, NDArray[Any] | Bf16]
) -> None:
    """Write a file whose bytes depend on the content and its order only; it appears whole or not at all.

    metadata: int (64 bits; a bool becomes 0 or 1), float, str or a list of these. arrays: of any memory layout.
    Raises KdtrError naming the key or array that KDTR cannot hold.
    """
    path = Path(path)
    stored = [_stored(path, name, array) for name, array in arrays.items()]
    header, entries = pack(path, metadata, [entry for entry, _ in stored])
    with files.replacing(path) as file:
        file.write(header)
        for entry, (_, array) in zip(entries, stored, strict=True):
            file.write(bytes(entry.offset - file.tell()))
            file.write(_bytes_of(array).data)


def _stored(path: Path, name: str, array: NDArray[Any] | Bf16) -> tuple[Entry, NDArray[Any]]:
    """The array as it is stored, contiguous and little-endian, and its entry but for the offset."""
    if isinstance(array, Bf16):
        dtype, values = "bfloat16", np.asarray(array.bits)
        if values.dtype.name != "uint16":
            complain(path, f"array '{name}'", "bits of bfloat16", "uint16", values.dtype.name)
    else:
        dtype, values = array.dtype.name, array
    if dtype not in LAYOUT:
        complain(path, f"array '{name}'", "dtype", f"one of {', '.join(LAYOUT)}", dtype)
    if values.ndim > MAX_DIMS:
        complain(path, f"array '{name}'", "dims", f"at most {MAX_DIMS}", values.ndim)
    values = np.asarray(values, dtype=LAYOUT[dtype][1], order="C")
    return Entry(name, dtype, values.shape, 0, values.nbytes, zlib.crc32(_bytes_of(values).data)), values
