"""KDTR in Python: round trips, the exact bytes, every refusal, and thousands of mutated files."""

from __future__ import annotations

import errno
import os
import random
import re
import struct
import tracemalloc
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from kdtp.model.weights import kdtr
from tests.conftest import ROOT
from tests.cpu.kdtr_cases import (
    EXAMPLE_METADATA,
    bad_files,
    dump,
    entry,
    example_arrays,
    image,
    metadata,
    mutate,
    seeds,
)

BAD = bad_files()


def bits(array: np.ndarray) -> tuple[object, ...]:
    return array.shape, array.dtype, array.tobytes()


def same_metadata(a: object, b: object) -> bool:
    return repr(a) == repr(b)  # tells 1 from 1.0 and True, and NaN equals itself


def test_round_trip_of_every_type(tmp_path: Path) -> None:
    arrays = example_arrays()
    kdtr.write(tmp_path / "f", EXAMPLE_METADATA, arrays)
    with kdtr.Reader(tmp_path / "f") as reader:
        assert same_metadata(reader.metadata, EXAMPLE_METADATA)
        assert list(reader.entries) == list(arrays)
        reader.verify()
        for name, array in arrays.items():
            bf16 = isinstance(array, kdtr.Bf16)
            source = array.bits if bf16 else array
            got, form = reader.array(name), reader.entries[name]
            assert bits(got) == bits(source)
            assert form.dtype == ("bfloat16" if bf16 else source.dtype.name)
            assert (form.name, form.shape, form.nbytes) == (name, source.shape, source.nbytes)
            assert form.offset % 64 == 0 and form.crc32 == zlib.crc32(source.tobytes())


def test_exact_bytes(tmp_path: Path) -> None:
    """A file put together by hand, so that a change of the format cannot go unseen."""
    kdtr.write(tmp_path / "f", {"k": 0}, {"a": np.zeros(2, np.float32), "b": np.ones((1, 3), bool)})
    crc = zlib.crc32(b"\1\1\1")
    table = metadata() + entry(offset=128) + entry(b"b", 5, (1, 3), 192, crc)
    assert (tmp_path / "f").read_bytes() == image(table, (1, 2), 195, data=b"\1\1\1")


def test_example_of_the_document(tmp_path: Path) -> None:
    kdtr.write(tmp_path / "f", {"k": 0}, {"a": np.zeros(2, np.float32)})
    lines = re.findall(r"^ *(\d+)  ((?:[0-9a-f]{2} +)+)", (ROOT / "docs/kdtr.md").read_text(), re.MULTILINE)
    shown = bytearray(136)
    for at, digits in lines:
        shown[int(at) : int(at) + len(digits.split())] = bytes.fromhex(digits)
    assert len(lines) == 8
    assert bytes(shown) == (tmp_path / "f").read_bytes()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_round_trip_of_anything(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    text = st.text(st.characters(exclude_categories=["Cs"]))
    number = st.integers(-(2**63), 2**63 - 1) | st.floats()
    name = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=255)
    values = data.draw(st.dictionaries(name, number | text | st.lists(number | text, max_size=4), max_size=4))
    dtypes = st.sampled_from(["<f4", ">f8", "<f2", "?", "i1", ">u2", "<i8", "u4"])
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    arrays = data.draw(st.dictionaries(name, hnp.arrays(dtypes, shapes), max_size=4))
    path = tmp_path_factory.getbasetemp() / "anything"
    kdtr.write(path, values, arrays)
    first = path.read_bytes()
    kdtr.write(path, values, {key: np.array(array, order="F") for key, array in arrays.items()})
    assert path.read_bytes() == first
    reader = kdtr.Reader(path)
    assert same_metadata(reader.metadata, values)
    for key, array in arrays.items():
        assert bits(reader.array(key)) == bits(array.astype(array.dtype.newbyteorder("<")))


def test_views_are_read_only_aligned_and_outlive_the_reader(tmp_path: Path) -> None:
    kdtr.write(tmp_path / "f", {}, {"a": np.arange(100.0)})
    with kdtr.Reader(tmp_path / "f") as reader:
        view = reader.array("a")
    assert view.ctypes.data % 64 == 0
    assert not view.flags.writeable
    with pytest.raises(ValueError):
        view[0] = 1
    kdtr.write(tmp_path / "f", {}, {"a": np.zeros(100)})  # replaces the file; the old one lives on in the view
    assert view[99] == 99.0
    with pytest.raises(ValueError, match="closed"):
        reader.array("a")


def test_unknown_array_is_named(tmp_path: Path) -> None:
    kdtr.write(tmp_path / "f", {}, {"a": np.zeros(1)})
    with pytest.raises(kdtr.KdtrError, match=r"f: has no array 'embed'"):
        kdtr.Reader(tmp_path / "f").array("embed")


def test_damage_is_found_when_the_array_is_used(tmp_path: Path) -> None:
    kdtr.write(tmp_path / "f", {}, {"a": np.zeros(8, np.uint8), "b": np.zeros(8, np.uint8)})
    file = (tmp_path / "f").read_bytes()
    (tmp_path / "f").write_bytes(file[:-1] + b"\1")
    reader = kdtr.Reader(tmp_path / "f")
    assert not reader.array("a").any()
    for _ in range(2):  # the second use is refused too
        with pytest.raises(kdtr.KdtrError, match="array 'b': crc32: want 0x6522df69, found 0x1225efff"):
            reader.array("b")
    with pytest.raises(kdtr.KdtrError, match="array 'b'"):
        reader.verify()


@pytest.mark.parametrize("fault", BAD)
def test_bad_file_is_refused_by_name(fault: str, tmp_path: Path) -> None:
    file, complaint = BAD[fault]
    (tmp_path / "f").write_bytes(file)
    with pytest.raises(kdtr.KdtrError) as caught:
        kdtr.Reader(tmp_path / "f").verify()
    assert str(caught.value) == f"{tmp_path / 'f'}: {complaint}"


def test_not_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(kdtr.KdtrError, match="not a regular file"):
            kdtr.Reader(path)
    with pytest.raises(FileNotFoundError):
        kdtr.Reader(tmp_path / "none")


@pytest.mark.parametrize(
    ("values", "arrays", "complaint"),
    [
        ({"a b": 1}, {}, "metadata 'a b': name: want 1..255 printable ASCII characters without space, found 3 bytes"),
        ({"": 1}, {}, "metadata '': name"),
        ({"k" * 256: 1}, {}, "found 256 bytes"),
        ({"k": 2**63}, {}, "metadata 'k': int: want at most 64 bits, found 65"),
        ({"k": [1, -(2**63) - 1]}, {}, "metadata 'k': int"),
        ({"k": None}, {}, "metadata 'k': value: want an int, float, str or flat list of these, found NoneType"),
        ({"k": [[1]]}, {}, "metadata 'k': value"),
        ({"k": (1,)}, {}, "found tuple"),
        ({"k": "\ud800"}, {}, "metadata 'k': string: want Unicode text, found lone surrogates"),
        ({"k": "x" * 2**26}, {}, f"table: size: want at most {2**26} bytes, found {2**26 + 7}"),
        ({}, {"ä": np.zeros(1)}, "array 'ä': name"),
        ({}, {"a": np.zeros(1, complex)}, "array 'a': dtype: want one of float32, float64, .* found complex128"),
        ({}, {"a": np.array(["x"])}, "array 'a': dtype"),
        ({}, {"a": np.array([None])}, "array 'a': dtype"),
        ({}, {"a": kdtr.Bf16(np.zeros(1, np.int16))}, "array 'a': bits of bfloat16: want uint16, found int16"),
        ({}, {"a": np.zeros((1,) * 9)}, "array 'a': dims: want at most 8, found 9"),
    ],
)  # fmt: skip
def test_writer_refuses_what_kdtr_cannot_hold(values, arrays, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(kdtr.KdtrError, match=complaint):
        kdtr.write(tmp_path / "f", values, arrays)
    assert not list(tmp_path.iterdir())


def test_write_is_atomic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kdtr.write(tmp_path / "f", {"k": 1}, {"a": np.zeros(3)})
    before = (tmp_path / "f").read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=rf"no space left: '{tmp_path}/f'"):
        kdtr.write(tmp_path / "f", {"k": 2}, {"a": np.ones(3)})
    assert (tmp_path / "f").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["f"]


def test_bool_metadata_is_an_int(tmp_path: Path) -> None:
    kdtr.write(tmp_path / "f", {"k": True}, {})
    assert repr(kdtr.Reader(tmp_path / "f").metadata) == "{'k': 1}"


def test_a_huge_sparse_file_costs_nothing(tmp_path: Path) -> None:
    """1 TiB with a table that claims most of it: refused by the table's limit, not read."""
    path = tmp_path / "f"
    path.write_bytes(b"KDTR\r\n\x1a\n" + struct.pack("<IIQQII", 1, 0, 2**40, 2**39, 1, 1))
    os.truncate(path, 2**40)
    with pytest.raises(kdtr.KdtrError, match=f"table size: want at most {2**26} bytes, found {2**39}"):
        kdtr.Reader(path)


def test_mutated_files_give_an_error_or_the_right_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: None)  # thousands of files that need not survive a power cut
    rng, files = random.Random(11), seeds(tmp_path)
    path, again = tmp_path / "f", tmp_path / "again"
    path.write_bytes(b"")
    complaints: Counter[str] = Counter()
    accepted = 0
    tracemalloc.start()
    for _ in range(1500):
        origin, file, sealed = mutate(rng, files)
        path.write_bytes(file)
        seen = dump(path)
        if "\nerror " in seen:
            complaints[re.sub(r"'.*'|\d+", "", seen.split(f"error {path}: ")[1]).split(": want")[0]] += 1
            continue
        accepted += 1
        if sealed:  # whatever it says now, it is sound: it can be written and says the same again
            reader = kdtr.Reader(path)
            arrays = {
                n: kdtr.Bf16(reader.array(n)) if e.dtype == "bfloat16" else reader.array(n)
                for n, e in reader.entries.items()
            }
            kdtr.write(again, reader.metadata, arrays)
            assert same_metadata(kdtr.Reader(again).metadata, reader.metadata)
            assert all(bits(kdtr.Reader(again).array(n)) == bits(reader.array(n)) for n in reader.entries)
        else:  # only the padding can have changed
            path.write_bytes(origin)
            assert dump(path) == seen
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert accepted > 100 and complaints.total() > 500
    assert len(complaints) >= 17, complaints  # the mutations get past the header, to almost every check
    assert peak < 4 << 20, peak
