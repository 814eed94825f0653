"""The head of a KDTR file: the fixed header and the table of metadata and arrays, read and packed.

All of it is little-endian. The header's checksum covers the table, each entry carries the checksum of its array. Every
length is checked against what the file holds before it is used, and every complaint reads
`file: where: what: want X, found Y`, word for word as in csrc/common/kdtr.h.
"""

from __future__ import annotations

import math
import mmap
import struct
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

MAGIC = b"KDTR\r\n\x1a\n"  # line ends and ^Z: a transfer in text mode destroys it
VERSION = 1
ALIGN = 64
MAX_DIMS = 8
MAX_NAME = 255
MAX_TABLE = 1 << 26  # bytes; about a million arrays
_INT64_MAX = (1 << 63) - 1

T = TypeVar("T")
Value: TypeAlias = int | float | str | list[Any]
_INT, _FLOAT, _TEXT, _LIST = 1, 2, 3, 4

FIXED = struct.Struct("<8sIIQQII")  # magic, version, header crc32, file bytes, table bytes, metadata and array counts
_CHECKED_FROM = 16  # the header's crc32 covers the bytes from here to the end of the table
LAYOUT = {  # dtype name: (code, numpy type of the stored elements)
    "float32": (1, "<f4"),
    "float64": (2, "<f8"),
    "float16": (3, "<f2"),
    "bfloat16": (4, "<u2"),
    "bool": (5, "?"),
    "int8": (6, "<i1"),
    "uint8": (7, "<u1"),
    "int16": (8, "<i2"),
    "uint16": (9, "<u2"),
    "int32": (10, "<i4"),
    "uint32": (11, "<u4"),
    "int64": (12, "<i8"),
    "uint64": (13, "<u8"),
}
_NAME_OF_CODE = {code: name for name, (code, _) in LAYOUT.items()}


class KdtrError(ValueError):
    """A KDTR file that is not sound, or content that KDTR cannot hold; names file, entry, expected and found."""


@dataclass(frozen=True)
class Bf16:
    """A bfloat16 array for `write`: numpy has no such type, so `bits` holds its raw values, uint16 of any shape."""

    bits: NDArray[np.uint16]


@dataclass(frozen=True)
class Entry:
    """One array of a file: `offset` and `nbytes` of its data in bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc32: int


def complain(path: Path, where: str, what: str, want: object, found: object) -> NoReturn:
    """Raise the KdtrError of this form, the only one there is."""
    raise KdtrError(f"{path}: {where}: {what}: want {want}, found {found}")


def parse(path: Path, data: mmap.mmap) -> tuple[dict[str, Value], dict[str, Entry]]:
    """Metadata and entries of the file whose whole content is `data`; raises KdtrError unless all of it is sound."""
    magic, version, crc, file_bytes, table_bytes, n_metadata, n_arrays = FIXED.unpack_from(data)
    if magic != MAGIC:
        complain(path, "header", "magic", MAGIC.hex(), magic.hex())
    if version != VERSION:
        complain(path, "header", "version", VERSION, version)
    if file_bytes != len(data):
        complain(path, "header", "file size", f"{file_bytes} bytes", len(data))
    most = min(MAX_TABLE, len(data) - FIXED.size)
    if table_bytes > most:
        complain(path, "header", "table size", f"at most {most} bytes", table_bytes)
    end = FIXED.size + table_bytes
    if (found := zlib.crc32(memoryview(data)[_CHECKED_FROM:end])) != crc:
        complain(path, "header", "crc32", f"0x{crc:08x}", f"0x{found:08x}")
    table = _Table(path, data[FIXED.size : end])
    return table.metadata(n_metadata), table.arrays(n_arrays, end, len(data))


class _Table:
    """A cursor over the table. `where` names what is being read."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.data, self.at, self.where = path, data, 0, "table"

    def fail(self, what: str, want: object, found: object) -> NoReturn:
        complain(self.path, self.where, what, want, found)

    def take(self, count: int) -> bytes:
        left = len(self.data) - self.at
        if count > left:
            self.fail("table", f"{count} more bytes", left)
        self.at += count
        return self.data[self.at - count : self.at]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def name(self, kind: str, index: int) -> str:
        self.where = f"{kind} {index}"
        raw = self.take(*self.unpack("<B"))
        if not _is_name(raw):
            self.fail("name", "1..255 printable ASCII characters without space", "others" if raw else "none")
        name = raw.decode("ascii")
        self.where = f"{kind} {index} '{name}'"
        return name

    def metadata(self, count: int) -> dict[str, Value]:
        return self.distinct("metadata", [(self.name("metadata", i), self.value(_LIST)) for i in range(count)])

    def distinct(self, kind: str, entries: list[tuple[str, T]]) -> dict[str, T]:
        self.where = kind
        named = dict(entries)
        if len(named) != len(entries):
            twin = min(name for name, times in Counter(name for name, _ in entries).items() if times > 1)
            self.fail("name", "distinct ones", f"two of '{twin}'")
        return named

    def value(self, highest: int) -> Value:
        (kind,) = self.unpack("<B")
        if not _INT <= kind <= highest:
            self.fail("kind", f"1..{highest}", kind)
        if kind in (_INT, _FLOAT):
            value: int | float = self.unpack("<q" if kind == _INT else "<d")[0]
            return value
        (count,) = self.unpack("<I")
        if kind == _LIST:
            return [self.value(_TEXT) for _ in range(count)]
        try:
            return self.take(count).decode("utf-8")
        except UnicodeDecodeError:
            self.fail("string", "UTF-8", "other bytes")

    def arrays(self, count: int, floor: int, file_bytes: int) -> dict[str, Entry]:
        entries: list[tuple[str, Entry]] = []
        for i in range(count):
            name = self.name("array", i)
            entries.append((name, self.entry(name, floor, file_bytes)))
            floor = entries[-1][1].offset + entries[-1][1].nbytes
        self.where = "table"
        if self.at != len(self.data):
            self.fail("size", f"{self.at} bytes", len(self.data))
        return self.distinct("arrays", entries)

    def entry(self, name: str, floor: int, file_bytes: int) -> Entry:
        """The rest of an entry; its data may start at `floor`, where what comes before it ends."""
        code, n_dims = self.unpack("<BB")
        if code not in _NAME_OF_CODE:
            self.fail("dtype", f"1..{len(LAYOUT)}", code)
        if n_dims > MAX_DIMS:
            self.fail("dims", f"at most {MAX_DIMS}", n_dims)
        shape = self.unpack(f"<{n_dims}Q")
        offset, crc = self.unpack("<QI")
        dtype = _NAME_OF_CODE[code]
        span = math.prod(max(n, 1) for n in shape) * np.dtype(LAYOUT[dtype][1]).itemsize
        if span > _INT64_MAX:  # also of an empty array: numpy multiplies its other dims
            self.fail("dims", "a product below 2^63 bytes", "x".join(map(str, shape)))
        nbytes = 0 if 0 in shape else span
        if offset % ALIGN:
            self.fail("offset", f"a multiple of {ALIGN}", offset)
        if offset < floor:
            self.fail("offset", f"at least {floor}", offset)
        if offset + nbytes > file_bytes:
            self.fail("data", f"an end by byte {file_bytes}", f"{nbytes} bytes at {offset}")
        return Entry(name, dtype, shape, offset, nbytes, crc)


def _is_name(raw: bytes) -> bool:
    return 1 <= len(raw) <= MAX_NAME and all(0x21 <= byte <= 0x7E for byte in raw)


def pack(path: Path, metadata: Mapping[str, Value], entries: Sequence[Entry]) -> tuple[bytes, list[Entry]]:
    """Header and table of a file, and `entries` with their offsets filled in; raises KdtrError for illegal content."""
    packed = [
        _packed_name(path, f"metadata '{key}'", key) + _packed(path, f"metadata '{key}'", value, _LIST)
        for key, value in metadata.items()
    ]
    table_bytes = sum(map(len, packed)) + sum(len(entry.name) + 15 + 8 * len(entry.shape) for entry in entries)
    if table_bytes > MAX_TABLE:
        complain(path, "table", "size", f"at most {MAX_TABLE} bytes", table_bytes)
    placed, end = [], FIXED.size + table_bytes
    for entry in entries:
        placed.append(replace(entry, offset=-(-end // ALIGN) * ALIGN))
        packed.append(_packed_entry(path, placed[-1]))
        end = placed[-1].offset + entry.nbytes
    table = b"".join(packed)
    assert len(table) == table_bytes, (len(table), table_bytes)
    checked = struct.pack("<QQII", end, table_bytes, len(metadata), len(placed)) + table
    return struct.pack("<8sII", MAGIC, VERSION, zlib.crc32(checked)) + checked, placed


def _packed_entry(path: Path, entry: Entry) -> bytes:
    dims = len(entry.shape)
    form = struct.pack(f"<BB{dims}QQI", LAYOUT[entry.dtype][0], dims, *entry.shape, entry.offset, entry.crc32)
    return _packed_name(path, f"array '{entry.name}'", entry.name) + form


def _packed_name(path: Path, where: str, name: str) -> bytes:
    raw = name.encode("utf-8", "surrogatepass")
    if not _is_name(raw):
        complain(path, where, "name", "1..255 printable ASCII characters without space", f"{len(raw)} bytes")
    return bytes([len(raw)]) + raw


def _packed(path: Path, where: str, value: object, highest: int) -> bytes:
    if isinstance(value, int):
        if not -_INT64_MAX - 1 <= value <= _INT64_MAX:
            complain(path, where, "int", "at most 64 bits", f"{value.bit_length() + 1}")
        return struct.pack("<Bq", _INT, value)
    if isinstance(value, float):
        return struct.pack("<Bd", _FLOAT, value)
    if isinstance(value, str):
        raw = value.encode("utf-8", "replace")
        if raw.decode("utf-8") != value:
            complain(path, where, "string", "Unicode text", "lone surrogates")
        return struct.pack("<BI", _TEXT, len(raw)) + raw
    if isinstance(value, list) and highest == _LIST:
        items = b"".join(_packed(path, where, item, _TEXT) for item in value)
        return struct.pack("<BI", _LIST, len(value)) + items
    complain(path, where, "value", "an int, float, str or flat list of these", type(value).__name__)
