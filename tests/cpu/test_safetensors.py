"""safetensors files: slices of them, damaged and hostile ones."""

from __future__ import annotations

import json
import os
import re
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.model.weights import safetensors
from kdtp.model.weights.safetensors import CheckpointError, File


def header(entries: object) -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text


def entry(dtype: object = "F32", shape: object = (1,), place: object = (0, 4)) -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": place}


HEADERS: list[tuple[bytes, str]] = [
    (b"\0" * 7, "file: size: want at least 8 bytes, found 7"),
    (struct.pack("<Q", 1 << 40) + b"{}", "header: length: want at most 2 bytes, found 1099511627776"),
    (struct.pack("<Q", 2) + b"[]", "header: kind: want a JSON object, found list"),
    (struct.pack("<Q", 2) + b"{\xff", "header: must be JSON"),
    (struct.pack("<Q", 17) + b'{"a": {}, "a": 1}', "header: must be JSON: two entries named 'a'"),
    (header({"a": 1}), "tensor 'a': entry: want dtype, shape and data_offsets, found 1"),
    (header({"a": entry("F4")}), "tensor 'a': dtype: want one of"),
    (header({"a": entry(["F32"])}), "tensor 'a': dtype: want one of"),
    (header({"a": entry(shape=[-1])}), "tensor 'a': shape: want a few counts, found [-1]"),
    (header({"a": entry(shape=[1] * 9)}), "tensor 'a': shape: want a few counts"),
    (header({"a": entry(shape=[2**62, 2**62])}), "tensor 'a': shape: want a few counts"),
    (header({"a": entry(place=[0])}), "tensor 'a': data_offsets: want a few counts, found [0]"),
    (header({"a": entry(place=[0, 8])}) + b"\0" * 8, "tensor 'a': bytes: want 4 for F32 [1], found 8"),
    (header({"a": entry()}) + b"\0" * 3, "tensor 'a': end of the data (is the file cut off?): want by byte"),
    (header({"a": entry()}) + b"\0" * 5, "file: size: want "),
    (header({"a": entry(), "b": entry()}) + b"\0" * 4, "tensor 'b': start of the data: want byte"),
    (header({"a": entry(place=[4, 8])}) + b"\0" * 8, "tensor 'a': start of the data: want byte"),
]


@pytest.mark.parametrize(("content", "complaint"), HEADERS, ids=[text for _, text in HEADERS])
def test_files_that_are_not_sound(content, complaint, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="^" + re.escape(f"{path}: {complaint}")):
        File(path)


def test_a_file_that_is_cut_while_it_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(SOUND)
    file = File(path)
    assert file.read("a").shape == (1,)
    os.truncate(path, 8)
    with pytest.raises(CheckpointError, match=r"x.safetensors: was changed while it was read"):
        file.read("a")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"x.safetensors: was changed while it was read"):
        file.read("a")


@pytest.mark.timeout(20)
def test_a_name_twice_among_many_is_found_soon(tmp_path):
    text = ("{" + "".join(f'"{i}":0,' for i in range(200_000)) + '"199999":0}').encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match="two entries named '199999'"):
        File(tmp_path / "x.safetensors")


SOUND = header({"__metadata__": {"format": "pt"}, "a": entry(), "b": entry("BF16", (2, 3), (4, 16))}) + b"\1" * 16


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(SOUND) - 1), st.integers(0, 255)), max_size=3), st.integers(0, len(SOUND)))
def test_damage_is_seen_or_harmless(tmp_path_factory, flips, length):
    content = bytearray(SOUND)
    for at, value in flips:
        content[at] = value
    path = tmp_path_factory.getbasetemp() / "damaged.safetensors"
    path.write_bytes(content[:length] if length % 3 else content)
    try:
        file = File(path)
    except CheckpointError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        for name in file.tensors:
            file.read(name)


def test_reading_slices(tmp_path):
    values = np.arange(600 * 700, dtype=np.float32).reshape(600, 700)
    arrays = {"pad": ("U8", np.zeros(3, np.uint8)), "w": ("F32", values), "e": ("I8", np.zeros(0))}
    safetensors.write(tmp_path / "x.safetensors", arrays)
    file = File(tmp_path / "x.safetensors")
    order = np.array([5, 3, 599, 3])
    assert (file.read("w") == values).all() and file.read("e").shape == (0,)
    assert (file.read("w", slice(7, 9), slice(100, 200)) == values[7:9, 100:200]).all()
    assert (file.read("w", order, slice(0, 10)) == values[order, :10]).all()
    assert file.read("w", slice(600, 600)).shape == file.read("w", order[:0]).shape == (0, 700)
    part = file.read("w", slice(0, 600))
    part[:] = 0  # a copy: the file stays as it is
    assert (file.read("w") == values).all()
