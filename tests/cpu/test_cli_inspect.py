"""`kdtp inspect`: the golden model, plain files, damaged and hostile ones."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from kdtp.__main__ import main
from kdtp.model.weights import kdtr
from tests.conftest import ROOT
from tests.cpu.kdtr_cases import bad_files

TINY = ROOT / "tests/refs/model_tiny.kdtr"


def run(path: Path, *flags: str) -> int:
    return main(["inspect", str(path), *flags])


def test_golden_model_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TINY, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    with kdtr.Reader(TINY) as reader:
        assert report["metadata"] == reader.metadata
        for shown, entry in zip(report["arrays"], reader.entries.values(), strict=True):
            assert shown == vars(entry) | {"shape": list(entry.shape), "crc_ok": True}
        parameters = sum(reader.array(name).size for name in reader.entries if not name.startswith("golden."))
    assert report["bytes"] == TINY.stat().st_size
    assert report["model"] == {
        "parameters": parameters,
        "layers": 4,
        "dense_layers": 1,
        "legal_tp": [1, 2, 4],
        "kv_bytes_per_token": {"float32": 4 * (64 + 16) * 4, "bfloat16": 4 * (64 + 16) * 2},
        "golden_tokens": 24,
    }


def test_golden_model_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(TINY) == 0
    lines = capsys.readouterr().out.splitlines()
    with kdtr.Reader(TINY) as reader:
        counts = len(reader.metadata), len(reader.entries)
    assert lines[0] == f"{TINY}: {TINY.stat().st_size} bytes, {counts[0]} values, {counts[1]} arrays"
    rows = lines[lines.index("arrays") + 1 : lines.index("model") - 1]
    assert len(rows) == 1 + counts[1]
    assert rows[0].split() == ["name", "dtype", "shape", "bytes", "offset", "crc32", "data"]
    assert all(row.endswith("  ok") for row in rows[1:])
    assert len({len(row) for row in rows[1:]}) == 1  # the columns are aligned
    assert "  golden tokens  24" in lines
    assert "  legal --tp     1 2 4" in lines


def test_file_that_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metadata = {"text": "a\x1b[2J\n", "long": list(range(1000)), "nan": math.nan, "list": [math.inf, 1]}
    kdtr.write(tmp_path / "f", metadata, {"a": np.zeros((), np.int8)})
    assert run(tmp_path / "f") == 0
    plain = capsys.readouterr().out
    assert "\x1b" not in plain and r"a\x1b[2J\n" in plain
    assert "… (1000 in all)" in plain and "\nmodel\n" not in plain
    assert run(tmp_path / "f", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["metadata"] == {**metadata, "nan": "nan", "list": ["inf", 1]}
    assert "model" not in report


def test_empty_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kdtr.write(tmp_path / "f", {}, {})
    assert run(tmp_path / "f") == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'f'}: 40 bytes, 0 values, 0 arrays\n")


def test_damaged_array_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kdtr.write(tmp_path / "f", {}, {"good": np.zeros(4), "bad": np.zeros(1, np.uint8)})
    (tmp_path / "f").write_bytes((tmp_path / "f").read_bytes()[:-1] + b"\1")
    complaint = f"kdtp inspect: {tmp_path / 'f'}: array 'bad': crc32: want 0xd202ef8d, found 0xa505df1b\n"
    for flags in ([], ["--json"]):
        assert run(tmp_path / "f", *flags) == 1
        shown = capsys.readouterr()
        assert shown.err == complaint
        if flags:
            assert [entry["crc_ok"] for entry in json.loads(shown.out)["arrays"]] == [True, False]
        else:
            assert [line.split()[-1] for line in shown.out.splitlines()[-2:]] == ["ok", "DAMAGED"]


def test_bad_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new\nline"
    for file, complaint in bad_files().values():
        path.write_bytes(file)
        assert run(path) == 1
        assert capsys.readouterr().err == f"kdtp inspect: {tmp_path}/new\\nline: {complaint}\n"


@pytest.mark.parametrize(
    ("metadata", "complaint"),
    [({}, "vocab_size"), ({"model.hidden": 3}, "unknown key 'hidden'"), ({"model.vocab_size": "many"}, "vocab_size")],
)
def test_bad_model_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], metadata: dict[str, kdtr.Value], complaint: str
) -> None:
    kdtr.write(tmp_path / "f", {"format": "kdtp-model", **metadata}, {})
    assert run(tmp_path / "f") == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1
    assert f"{tmp_path / 'f'}: " in shown.err and complaint in shown.err


def test_absurd_model_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with kdtr.Reader(TINY) as reader:
        metadata = reader.metadata
    kdtr.write(tmp_path / "f", metadata | {"model.num_hidden_layers": 2**40}, {})
    assert run(tmp_path / "f", "--json") == 1
    assert capsys.readouterr().err == (
        f"kdtp inspect: {tmp_path / 'f'}: num_hidden_layers = 1099511627776: must be 1..1024\n"
    )
    large = {"model.num_attention_heads": 4096, "model.intermediate_size": 2**20, "model.moe_intermediate_size": 2**20}
    kdtr.write(tmp_path / "f", metadata | large | {"model.num_hidden_layers": 1024}, {})
    assert run(tmp_path / "f", "--json") == 0
    model = json.loads(capsys.readouterr().out)["model"]
    assert model["legal_tp"] == [2**i for i in range(10)]  # each rank has one of 512 token ids
    assert (model["parameters"], model["golden_tokens"], model["layers"]) == (0, 0, 1024)


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none") == 1
    shown = capsys.readouterr()
    assert f"kdtp inspect: {tmp_path}/none: no such file" in shown.err and shown.err.count("\n") == 1
