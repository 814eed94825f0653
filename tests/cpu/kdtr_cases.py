"""KDTR files for tests, put together from the byte table of docs/kdtr.md and not by the writer: good, bad and mutated.

Also `dump`, which prints what csrc/tests/kdtr_dump.c prints, as the Python reader sees the file.
"""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

import numpy as np

from kdtp.model.weights import kdtr, kdtr_table

EXTREMES = [0, 1, 2, 7, 63, 64, 2**8 - 1, 2**16 - 1, 2**31 - 1, 2**32 - 1, 2**48, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
EXAMPLE_METADATA = {
    "format": "test",
    "text": "höhe\0\n",
    "n": -(2**63),
    "x": [1, 2.5, "ä"],
    "none": [],
    "nan": float("nan"),
}


def example_arrays() -> dict[str, np.ndarray | kdtr.Bf16]:
    rng = np.random.default_rng(5)
    arrays: dict[str, np.ndarray | kdtr.Bf16] = {"t": np.array([[1.5, -2.25]]).T}
    for name in ("float32", "float64", "float16"):
        arrays[name] = rng.standard_normal((3, 2)).astype(name)
    for name in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"):
        arrays[name] = rng.integers(np.iinfo(name).min, np.iinfo(name).max, 5, name, endpoint=True)
    arrays["bfloat16"] = kdtr.Bf16(rng.integers(0, 2**16, (2, 1, 2), np.uint16))
    arrays["bool"] = rng.integers(0, 2, 70).astype(bool)
    return arrays | {"scalar": np.array(7, np.int32), "empty": np.zeros((2, 0, 3), np.float32), "z": np.zeros(0, bool)}


def metadata(key: bytes = b"k", value: bytes = b"\x01" + bytes(8)) -> bytes:
    return bytes([len(key)]) + key + value


def entry(
    name: bytes = b"a", code: int = 1, dims: tuple[int, ...] = (2,), offset: int = 128, crc: int = zlib.crc32(bytes(8))
) -> bytes:
    fixed = struct.pack(f"<BB{len(dims)}QQI", code, len(dims), *dims, offset, crc)
    return bytes([len(name)]) + name + fixed


def image(
    table: bytes, counts: tuple[int, int], size: int = 192, *, table_bytes: int | None = None, data: bytes = b""
) -> bytes:
    """A sealed file of `size` bytes: header, table, zeros, `data` at its end."""
    length = len(table) if table_bytes is None else table_bytes
    head = b"KDTR\r\n\x1a\n" + struct.pack("<IIQQII", 1, 0, size, length, *counts) + table
    return seal(head + bytes(size - len(head) - len(data)) + data)


def seal(file: bytes) -> bytes:
    """The file with a header checksum that fits, so that a reader goes on to what is behind it."""
    end = min(40 + int.from_bytes(file[24:32], "little"), len(file))
    return file[:12] + struct.pack("<I", zlib.crc32(file[16:end])) + file[16:]


def bad_files() -> dict[str, tuple[bytes, str]]:
    """By the name of the fault: a file, and the complaint about it without the path."""
    good = image(entry(), (0, 1))
    two = entry(b"a", offset=128) + entry(b"b", offset=192)
    text = lambda raw: metadata(value=b"\x03" + struct.pack("<I", len(raw)) + raw)  # noqa: E731
    name = "name: want 1..255 printable ASCII characters without space, found"
    cases = {
        "empty file": (b"", "file: size: want at least 40 bytes, found 0"),
        "cut in the header": (good[:39], "file: size: want at least 40 bytes, found 39"),
        "other file": (b"\x7fELF" + bytes(96), "header: magic: want 4b4454520d0a1a0a, found 7f454c4600000000"),
        "text mode": (good.replace(b"\r\n", b"\n"), "header: magic: want 4b4454520d0a1a0a, found 4b4454520a1a0a01"),
        "version 2": (good[:8] + b"\2" + good[9:], "header: version: want 1, found 2"),
        "cut by a byte": (good[:-1], "header: file size: want 192 bytes, found 191"),
        "a byte too long": (good + b"\0", "header: file size: want 192 bytes, found 193"),
        "table beyond the file": (
            image(b"", (0, 0), table_bytes=153),
            "header: table size: want at most 152 bytes, found 153",
        ),
        "absurd table": (
            image(b"", (0, 0), table_bytes=2**64 - 1),
            f"header: table size: want at most 152 bytes, found {2**64 - 1}",
        ),
        "flipped bit in the table": (good[:41] + b"c" + good[42:], "header: crc32: want 0xad3cb448, found 0x40aa67a1"),
        "more arrays than entries": (image(entry(), (0, 2)), "array 1: table: want 1 more bytes, found 0"),
        "4 billion arrays": (image(entry(), (0, 2**32 - 1)), "array 1: table: want 1 more bytes, found 0"),
        "4 billion values": (image(metadata(), (2**32 - 1, 0)), "metadata 1: table: want 1 more bytes, found 0"),
        "fewer arrays than entries": (image(two, (0, 1), 256), "table: size: want 24 bytes, found 48"),
        "array without a name": (image(entry(b""), (0, 1)), f"array 0: {name} none"),
        "array with a space in its name": (image(entry(b"a b"), (0, 1)), f"array 0: {name} others"),
        "array with NUL in its name": (image(entry(b"a\0b"), (0, 1)), f"array 0: {name} others"),
        "key with an escape": (image(metadata(b"\x1b[2J"), (1, 0)), f"metadata 0: {name} others"),
        "key with DEL": (image(metadata(b"\x7f"), (1, 0)), f"metadata 0: {name} others"),
        "non-ASCII key": (image(metadata("ä".encode()), (1, 0)), f"metadata 0: {name} others"),
        "two arrays of one name": (
            image(entry() + entry(offset=192), (0, 2), 256),
            "arrays: name: want distinct ones, found two of 'a'",
        ),
        "two keys of one name": (
            image(metadata(b"b") + metadata() + metadata(b"b") + metadata(), (4, 0)),
            "metadata: name: want distinct ones, found two of 'b'",
        ),
        "kind 0": (image(metadata(value=b"\0" + bytes(8)), (1, 0)), "metadata 0 'k': kind: want 1..4, found 0"),
        "kind 5": (image(metadata(value=b"\5" + bytes(8)), (1, 0)), "metadata 0 'k': kind: want 1..4, found 5"),
        "list in a list": (
            image(metadata(value=b"\4\1\0\0\0\4\0\0\0\0"), (1, 0)),
            "metadata 0 'k': kind: want 1..3, found 4",
        ),
        "list beyond the table": (
            image(metadata(value=b"\4\xff\xff\xff\xff" + 3 * (b"\1" + bytes(8))), (1, 0)),
            "metadata 0 'k': table: want 1 more bytes, found 0",
        ),
        "string beyond the table": (
            image(metadata(value=b"\3\xff\xff\xff\xffabc"), (1, 0)),
            "metadata 0 'k': table: want 4294967295 more bytes, found 3",
        ),
        "cut number": (
            image(metadata(value=b"\2" + bytes(7)), (1, 0)),
            "metadata 0 'k': table: want 8 more bytes, found 7",
        ),
        "dtype 0": (image(entry(code=0), (0, 1)), "array 0 'a': dtype: want 1..13, found 0"),
        "dtype 14": (image(entry(code=14), (0, 1)), "array 0 'a': dtype: want 1..13, found 14"),
        "9 dims": (image(entry(dims=(1,) * 9), (0, 1), 256), "array 0 'a': dims: want at most 8, found 9"),
        "cut dims": (image(entry()[:9], (0, 1)), "array 0 'a': table: want 8 more bytes, found 5"),
        "cut offset": (image(entry()[:-1], (0, 1)), "array 0 'a': table: want 12 more bytes, found 11"),
        "dims that overflow": (
            image(entry(dims=(2**32, 2**32)), (0, 1)),
            f"array 0 'a': dims: want a product below 2^63 bytes, found {2**32}x{2**32}",
        ),
        "dims that overflow to the right size": (
            image(entry(dims=(2, 2**63, 2)), (0, 1)),
            f"array 0 'a': dims: want a product below 2^63 bytes, found 2x{2**63}x2",
        ),
        "dims of an empty array that overflow": (
            image(entry(dims=(0, 2**63)), (0, 1)),
            f"array 0 'a': dims: want a product below 2^63 bytes, found 0x{2**63}",
        ),
        "misaligned": (image(entry(offset=120), (0, 1)), "array 0 'a': offset: want a multiple of 64, found 120"),
        "in the header": (image(entry(offset=0), (0, 1)), "array 0 'a': offset: want at least 64, found 0"),
        "overlapping": (
            image(entry(dims=(17,)) + entry(b"b", offset=192), (0, 2), 256),
            "array 1 'b': offset: want at least 196, found 192",
        ),
        "out of order": (
            image(entry(offset=192) + entry(b"b", offset=128), (0, 2), 256),
            "array 1 'b': offset: want at least 200, found 128",
        ),
        "beyond the file": (
            image(entry(dims=(17,)), (0, 1)),
            "array 0 'a': data: want an end by byte 192, found 68 bytes at 128",
        ),
        "far beyond the file": (
            image(entry(offset=2**64 - 64), (0, 1)),
            f"array 0 'a': data: want an end by byte 192, found 8 bytes at {2**64 - 64}",
        ),
        "empty array beyond the file": (
            image(entry(dims=(0,), offset=256), (0, 1)),
            "array 0 'a': data: want an end by byte 192, found 0 bytes at 256",
        ),
        "damaged data": (
            image(entry(), (0, 1), 136, data=bytes(7) + b"\1"),
            "array 'a': crc32: want 0x6522df69, found 0x1225efff",
        ),
        "bool of 2": (
            image(entry(code=5, crc=zlib.crc32(b"\1\2")), (0, 1), 130, data=b"\1\2"),
            "array 'a': bool: want bytes 0 and 1, found 2",
        ),
    }
    not_utf8 = [b"\x80", b"\xc0\x80", b"\xc1\xbf", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xf0\x8f\xbf\xbf", b"\xc3"]
    not_utf8 += [
        b"\xf4\x90\x80\x80",
        b"\xf5\x80\x80\x80",
        b"\xff",
        b"a\xe4\xb8",
        b"\xe4\xb8a",
        b"\xc3\xc3",
        b"\xf0\x90\x80",
    ]
    for raw in not_utf8:
        cases[f"string {raw.hex()}"] = image(text(raw), (1, 0)), "metadata 0 'k': string: want UTF-8, found other bytes"
    return cases


def seeds(folder: Path) -> list[bytes]:
    """Sound files to mutate."""
    files = [
        image(b"", (0, 0), 40),
        image(metadata() + entry(), (1, 1)),
        image(entry(dims=()) + entry(b"b", offset=192), (0, 2), 256),
    ]
    for i, arrays in enumerate([{}, {"a": np.arange(6.0)}, example_arrays()]):
        kdtr.write(folder / f"seed{i}", EXAMPLE_METADATA, arrays)
        files.append((folder / f"seed{i}").read_bytes())
    return files


def mutate(rng: random.Random, files: list[bytes]) -> tuple[bytes, bytes, bool]:
    """One of `files`, a mutation of it, and whether its checksum and sizes were made to fit again."""
    origin = rng.choice(files)
    file = bytearray(origin)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        rng.choice([_flip, _cut, _splice, _number, _number, _repeat])(rng, file, files)
    sealed = len(file) >= 40 and rng.random() < 0.75
    if sealed:
        file[16:24] = len(file).to_bytes(8, "little")
        file = bytearray(seal(bytes(file)))
    return origin, bytes(file), sealed


def _flip(rng: random.Random, file: bytearray, _: list[bytes]) -> None:
    if file:
        file[rng.randrange(len(file))] ^= 1 << rng.randrange(8)


def _cut(rng: random.Random, file: bytearray, _: list[bytes]) -> None:
    del file[rng.randrange(len(file) + 1) :]


def _splice(rng: random.Random, file: bytearray, files: list[bytes]) -> None:
    other = rng.choice(files)
    file[rng.randrange(len(file) + 1) :] = other[rng.randrange(len(other)) :]


def _number(rng: random.Random, file: bytearray, _: list[bytes]) -> None:
    """An extreme integer somewhere, mostly in the header."""
    size = rng.choice([1, 2, 4, 8])
    at = rng.randrange(min(len(file), rng.choice([40, 120, 10**6])) + 1)
    value = (rng.choice(EXTREMES) + rng.choice([-1, 0, 1])) % 2 ** (8 * size)
    file[at : at + size] = value.to_bytes(size, "little")


def _repeat(rng: random.Random, file: bytearray, _: list[bytes]) -> None:
    start, at = rng.randrange(len(file) + 1), rng.randrange(len(file) + 1)
    file[at:at] = file[start : start + rng.randrange(64)]


def dump(path: Path) -> str:
    """What csrc/tests/kdtr_dump.c prints of the file."""
    try:
        reader = kdtr.Reader(path)
    except kdtr.KdtrError as error:
        return f"file {path}\nerror {error}\n"
    lines = [f"file {path}"]
    lines += [f"metadata {key} {_value_text(value)}" for key, value in reader.metadata.items()]
    for name, form in reader.entries.items():
        try:
            data = reader.array(name)
        except kdtr.KdtrError as error:
            lines.append(f"error {error}")
            continue
        dims = "".join(f" {n}" for n in form.shape)
        ends = "".join(_element_text(form.dtype, v) for v in data.reshape(-1)[[0, -1]]) if data.size else ""
        code = list(kdtr_table.LAYOUT).index(form.dtype) + 1
        adler = zlib.adler32(data.tobytes())
        lines.append(
            f"array {name} dtype {code} dims{dims} at {form.offset} bytes {form.nbytes} adler {adler:08x}{ends}"
        )
    return "\n".join(lines) + "\n"


def _value_text(value: kdtr.Value) -> str:
    if isinstance(value, int):
        return f"int {value}"
    if isinstance(value, float):
        return f"float {struct.pack('>d', value).hex()}"
    if isinstance(value, str):
        return f"text {value.encode().hex()}"
    return " ".join([f"list {len(value)}", *map(_value_text, value)])


def _element_text(dtype: str, value: np.generic) -> str:
    if dtype == "float16":
        value = value.view(np.uint16)
    digits = {"float32": ".9g", "float64": ".17g"}.get(dtype, "d")
    return f" {value.item():{digits}}"
