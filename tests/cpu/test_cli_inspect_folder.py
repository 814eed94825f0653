"""`kdtp inspect` of a published folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kdtp import pair
from kdtp.__main__ import main
from kdtp.model.weights.hf import Checkpoint
from kdtp.model.weights.hf_sizes import weight_bytes
from kdtp.model.weights.load import Weights, open_model
from kdtp.model.weights.table import parameters
from tests import hf_cases
from tests.paths import TINY


def run(path: Path, *flags: str) -> int:
    return main(["inspect", str(path), *flags])


def test_as_text(tmp_path, capsys):
    path = hf_cases.write("k25", tmp_path / "k25")
    assert run(path, "--gpu-memory", "2.0004") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{path}: kimi_k25, 66")
    for line in (
        "  layers        3, the first 1 dense",
        "  vocabulary    67 tokens; stop: 64 66",
        "  not loaded    vision tower (1 tensors, 256 bytes), vision projector (1 tensors, 256 bytes)",
        "  legal --tp    1 2",
        "  KV per token  576 bytes in float32, 288 in bfloat16, on every rank",
        "each rank, in bfloat16 on cuda",
    ):
        assert line in lines
    assert "INT4 332.35 kB" in next(line for line in lines if line.startswith("  stored as"))
    rows = [line.split(maxsplit=3) for line in lines[-2:]]
    assert [row[0] for row in rows] == ["1", "2"]
    assert rows[0][3] == "does not fit: 248.13 kB short" and rows[1][3] == "221 tokens"
    assert run(path, "--device", "cpu") == 0
    assert "  legal --tp    1 2 4" in capsys.readouterr().out.splitlines()


def test_as_json(tmp_path, capsys):
    assert run(hf_cases.write("fp8", tmp_path), "--json", "--tp", "2", "--device", "cpu", "--dtype", "float32") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["family"] == "deepseek_v3" and found["legal_tp"] == [1, 2, 4]
    assert found["kv_bytes_per_token"] == {"float32": 3 * 144 * 4, "bfloat16": 3 * 144 * 2}
    assert found["not_loaded"] == [{"what": "multi-token prediction layer 3", "tensors": 4, "nbytes": 2560}]
    assert [rank["tp"] for rank in found["ranks"]] == [2] and "fits" not in found["ranks"][0]
    values = hf_cases.Tensors(hf_cases.VARIANTS["fp8"]).values
    assert found["parameters"] == sum(array.size for array in values.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["v2_lite", "k2_int4", "tied"])
def test_what_it_says_is_what_loading_takes(name, dtype, tmp_path):
    path = hf_cases.write(name, tmp_path)
    for rank in range(2):
        with open_model(path) as source, Checkpoint(path) as checkpoint:
            weights = Weights(source, rank, 2, dtype, lambda done, total: None)
            held = sum(weights.take(key).nbytes for key in parameters(source.config))
            assert weight_bytes(checkpoint, rank, 2, "cpu", dtype) == held


def test_int4_that_stays_is_counted_as_stored(tmp_path):
    path = hf_cases.write("k2_int4", tmp_path)
    with open_model(path) as source, Checkpoint(path) as checkpoint:
        weights = Weights(source, 0, 2, "bfloat16", lambda done, total: None)
        experts = [name for name in parameters(source.config) if ".experts." in name]
        assert not weights.keeps_int4(*experts)  # on a CPU
        int4 = sum(part.nbytes for name in experts for part in weights.int4(name))
        rest = sum(weights.take(name).nbytes for name in parameters(source.config) if name not in experts)
        assert weight_bytes(checkpoint, 0, 2, "cuda", "bfloat16") == int4 + rest


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--tp", "3"], "--tp = 3: {path} can be split over 1, 2, 4 ranks"),
        (["--gpu-memory", "0"], "--gpu-memory = 0: must be the GB of one GPU, such as 141"),
        (["--gpu-memory", "nan"], "--gpu-memory = nan: must be the GB of one GPU, such as 141"),
    ],
)
def test_refused(flags, complaint, tmp_path, capsys):
    path = hf_cases.write("v3", tmp_path)
    assert run(path, *flags) == 1
    assert capsys.readouterr().err == f"kdtp inspect: {complaint.format(path=path)}\n"


def test_flags_of_folders_say_nothing_of_files(capsys):
    assert run(TINY, "--tp", "2") == 1
    assert capsys.readouterr().err == f"kdtp inspect: --tp: goes with a model folder, and {TINY} is none\n"


def test_a_damaged_folder_is_one_line(tmp_path, capsys):
    path = hf_cases.write("v3", tmp_path)
    (path / "model-00002-of-000002.safetensors").unlink()
    assert run(path) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.endswith("model-00002-of-000002.safetensors: no such file or directory\n")


def test_a_drafter(capsys):
    assert run(pair.DRAFTER) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{pair.DRAFTER}: DFlash 2, 4.96 MB"
    for line in (
        "  layers      3, which see all of the text",
        "  block       8: the newest token, and 7 that it drafts",
        "  legal --tp  1 2 4",
        "  layers       6; it reads behind 1, 3, 4",
    ):
        assert line in lines
    assert run(pair.DRAFTER, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["parameters"] * 2 == found["bytes"] and found["target"]["vocab_size"] == 3072
    assert run(pair.DRAFTER, "--tp", "2") == 1
    assert "--tp: goes with a model folder" in capsys.readouterr().err


def test_a_drafter_that_is_refused(tmp_path, capsys):
    settings = json.loads((pair.DRAFTER / "config.json").read_text()) | {"dflash_config": {}, "magic": 1}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert run(tmp_path) == 1
    assert "config.json: unknown key 'magic'" in capsys.readouterr().err


def test_the_target_that_ships(capsys):
    assert run(Path("pair"), "--json", "--device", "cpu") == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(pair.TARGET)
