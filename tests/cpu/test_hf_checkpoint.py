"""Checkpoints that are not what they say: an error that names file, tensor, expected and found."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtp.__main__ import main
from kdtp.config import ConfigError, EngineConfig
from kdtp.engine.plan import plan
from kdtp.model import shard
from kdtp.model.comm import Solo
from kdtp.model.shard import Shard
from kdtp.model.weights import safetensors
from kdtp.model.weights.hf import Checkpoint
from kdtp.model.weights.hf_model import unpacked
from kdtp.model.weights.load import Weights, open_model
from kdtp.model.weights.safetensors import CheckpointError, File
from kdtp.model.weights.table import parameters
from tests import hf_cases

Change = Callable[[hf_cases.Stored], None]
DOWN = "model.layers.1.mlp.experts.3.down_proj.weight"
KV_A = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
NORM, GATE = "model.norm.weight", "model.layers.1.mlp.gate.weight"


def changed(name: str, folder: Path, change: Change, shards: int = 1, **config: object) -> Path:
    """A variant with a change to its tensors."""
    variant = hf_cases.VARIANTS[name]
    tensors = hf_cases.checkpoint(variant)
    change(tensors)
    return hf_cases.write_folder(folder, hf_cases.config_json(variant) | config, tensors, shards)


def setting(name: str, dtype: str, shape: tuple[int, ...]) -> Change:
    def change(tensors: hf_cases.Stored) -> None:
        tensors[name] = dtype, np.zeros(shape, safetensors.LAYOUT[dtype])

    return change


def without(name: str) -> Change:
    def change(tensors: hf_cases.Stored) -> None:
        del tensors[name]

    return change


TENSORS: list[tuple[str, Change, str]] = [
    ("v3", without(NORM), "tensor 'model.norm.weight': is missing"),
    ("v3", without("lm_head.weight"), "tensor 'lm_head.weight': is missing"),
    ("v3", without(DOWN), f"tensor '{DOWN}': is missing"),
    ("k25", without(f"language_model.{NORM}"), "tensor 'language_model.model.norm.weight': is missing"),
    ("v3", setting(NORM, "BF16", (63,)), "tensor 'model.norm.weight': shape: want [64], found [63]"),
    ("v3", setting(KV_A, "F32", (64, 48)), f"tensor '{KV_A}': shape: want [48, 64], found [64, 48]"),
    ("v3", setting(KV_A, "I8", (48, 64)), f"tensor '{KV_A}': dtype: want BF16 or F16 or F32, found I8"),
    ("v3", setting("q.bias", "F32", (3,)), "tensor 'q.bias' (F32 [3]) is no parameter of this model (1 such)"),
    (
        "v3",
        setting("model.layers.4.input_layernorm.weight", "F32", (64,)),  # layer 3 is the only one of MTP
        "tensor 'model.layers.4.input_layernorm.weight' (F32 [64]) is no parameter of this model (1 such)",
    ),
    ("v3", setting("vision_tower.x", "F32", (1,)), "tensor 'vision_tower.x' (F32 [1])"),
    ("tied", setting("lm_head.weight", "F32", (67, 64)), "tensor 'lm_head.weight' (F32 [67, 64]) is no parameter"),
    ("v3", setting(f"{DOWN}_packed", "I32", (64, 4)), "INT4: want a quantization_config of compressed-tensors"),
    ("v3", setting(DOWN, "F8_E4M3", (64, 32)), "FP8: want a quantization_config of quant_method fp8, found none such"),
    ("v3", setting(GATE, "F8_E4M3", (16, 64)), f"tensor '{GATE}': dtype: want BF16 or F16 or F32, found F8_E4M3"),
    ("k2_int4", without(f"{DOWN}_scale"), f"tensor '{DOWN}_scale': is missing"),
    ("k2_int4", without(f"{DOWN}_shape"), f"tensor '{DOWN}_shape': is missing"),
    ("k2_int4", setting(f"{DOWN}_packed", "I32", (64, 15)), "shape: want [64, 16], found [64, 15]"),
    ("k2_int4", setting(f"{DOWN}_packed", "U8", (64, 16)), f"'{DOWN}_packed': dtype: want I32, found U8"),
    ("k2_int4", setting(f"{DOWN}_scale", "BF16", (64, 2)), "group size: want 32, found 64 (BF16 [64, 2])"),
    ("k2_int4", setting(f"{DOWN}_scale", "F32", (64, 4)), f"'{DOWN}_scale': dtype: want BF16, found F32"),
    ("k2_int4", setting(f"{DOWN}_g_idx", "I32", (4,)), f"tensor '{DOWN}_g_idx' (I32 [4]) is no parameter"),
    ("fp8", without(f"{KV_A}_scale_inv"), f"tensor '{KV_A}_scale_inv': is missing"),
    ("fp8", setting(f"{KV_A}_scale_inv", "F32", (1, 2)), f"'{KV_A}_scale_inv': shape: want [2, 2], found [1, 2]"),
    ("fp8", setting(f"{KV_A}_scale_inv", "BF16", (2, 2)), f"'{KV_A}_scale_inv': dtype: want F32, found BF16"),
]


@pytest.mark.parametrize(("name", "change", "complaint"), TENSORS, ids=[text for _, _, text in TENSORS])
def test_tensors_that_cannot_be(name, change, complaint, tmp_path, capsys):
    path = changed(name, tmp_path, change)
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path)) + ".*" + re.escape(complaint)):
        plan(EngineConfig(str(path)))
    assert main(["generate", "--model", str(path), "--prompt-tokens", "1"]) == 2
    shown = capsys.readouterr().err
    assert complaint in shown and shown.count("\n") == 1


def test_an_int4_model_splits_at_whole_groups_only(tmp_path):
    path = hf_cases.write("k2_int4", tmp_path / "a")
    with open_model(path) as source:
        assert source.config.moe_intermediate_size == 128 and source.legal_tp() == [1, 2, 4]
    narrow = hf_cases.Variant(hf_cases.VARIANTS["k2_int4"].config | {"moe_intermediate_size": 64}, 1, quantized="int4")
    path = hf_cases.write_folder(tmp_path / "b", hf_cases.config_json(narrow), hf_cases.checkpoint(narrow))
    with pytest.raises(ValueError, match="tp = 4: b can be split over 1, 2 ranks"):
        plan(EngineConfig(str(path), tp=4))


@pytest.mark.parametrize("key", ["hidden_size", "moe_intermediate_size"])
def test_int4_that_a_gpus_kernel_does_not_take(key, tmp_path, monkeypatch):
    monkeypatch.setattr("kdtp.engine.plan._check_cuda", lambda: None)
    odd = hf_cases.Variant(hf_cases.VARIANTS["k2_int4"].config | {key: 96}, 1, quantized="int4")
    path = hf_cases.write_folder(tmp_path / "a", hf_cases.config_json(odd), hf_cases.checkpoint(odd))
    with pytest.raises(
        ConfigError, match=r"a: hidden_size, moe_intermediate_size = \(.*96.*\): must be multiples of 64"
    ):
        plan(EngineConfig(str(path), device="cuda", dtype="bfloat16"))
    plan(EngineConfig(str(path), device="cuda", dtype="float32"))
    plan(EngineConfig(str(path), dtype="bfloat16"))


def index_of(path: Path) -> dict:
    return json.loads((path / "model.safetensors.index.json").read_text())


def shards_of(path: Path) -> list[Path]:
    return sorted(path.glob("*.safetensors"))


def remap(path: Path, name: str, shard: object) -> None:
    index = index_of(path)
    index["weight_map"][name] = shard
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def cut(path: Path) -> None:
    shard = shards_of(path)[1]
    shard.write_bytes(shard.read_bytes()[:-1])


def replace_by_folder(path: Path) -> None:
    shard = shards_of(path)[1]
    shard.unlink()
    shard.mkdir()


def twice(path: Path) -> None:
    first, second = shards_of(path)[:2]
    held = {name: ("BF16", File(first).read(name)) for name in [NORM] if name in File(first).tensors}
    other = {n: (t.dtype, File(second).read(n)) for n, t in File(second).tensors.items()}
    held = held or {NORM: ("BF16", np.zeros(64, np.uint16))}
    target, tensors = (second, other) if NORM not in other else (first, {})
    tensors = tensors or {n: (t.dtype, File(first).read(n)) for n, t in File(first).tensors.items()}
    safetensors.write(target, tensors | held)


FOLDERS: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: shards_of(path)[0].unlink(), r"model-00001-of-000003.safetensors: no such file or directory"),
    (replace_by_folder, r"model-00002-of-000003.safetensors: file: kind: want a file, found a directory"),
    (cut, r"model-00002-of-000003.safetensors: tensor '.*': end of the data \(is the file cut off\?\): want by byte"),
    (twice, r"tensor 'model.norm.weight': is in model-0000\d-of-000003.safetensors too"),
    (
        lambda path: remap(path, "model.gone.weight", shards_of(path)[0].name),
        r"index.json: tensor 'model.gone.weight': want it in model-00001\S+, found it in no shard \(is the index stale",
    ),
    (
        lambda path: remap(path, NORM, next(s.name for s in shards_of(path) if NORM not in File(s).tensors)),
        r"index.json: tensor 'model.norm.weight': want it in model-\S+, found it in model-\S+ \(is the index stale",
    ),
    (lambda path: remap(path, NORM, "../x.safetensors"), r"want a .safetensors file of this folder, found '../x"),
    (lambda path: remap(path, NORM, "a\0.safetensors"), r"want a .safetensors file of this folder, found 'a"),
    (lambda path: remap(path, NORM, "\ud800.safetensors"), r"want a .safetensors file of this folder, found"),
    (lambda path: remap(path, NORM, "a" * 300 + ".safetensors"), r"want a .safetensors file of this folder, found"),
    (lambda path: remap(path, NORM, 3), r"want a .safetensors file of this folder, found '3'"),
    (lambda path: (path / "model.safetensors.index.json").write_text("{}"), r"weight_map: want tensors and their"),
    (lambda path: (path / "model.safetensors.index.json").write_text("["), r"index.json: must be JSON"),
    (lambda path: (path / "model.safetensors.index.json").unlink(), r"model.safetensors: no such file or directory"),
    (
        lambda path: shutil.copy(shards_of(path)[0], path / "model-00004-of-000003.safetensors"),
        r"model-00004-of-000003.safetensors: want it among the shards of the model, found that model.safetensors.index",
    ),
]


@pytest.mark.parametrize(("damage", "complaint"), FOLDERS)
def test_folders_that_are_not_whole(damage, complaint, tmp_path):
    path = hf_cases.write("k2", tmp_path)
    damage(path)
    with pytest.raises(ValueError, match="^" + re.escape(f"{tmp_path}/") + ".*" + complaint):
        plan(EngineConfig(str(path)))


def test_a_shard_is_no_model(tmp_path):
    first = shards_of(hf_cases.write("k2", tmp_path))[0]
    with pytest.raises(
        ValueError, match=re.escape(f"{first}: want a KDTR file, found a shard of a model folder: give")
    ):
        plan(EngineConfig(str(first)))


def test_a_tensor_that_the_index_does_not_know(tmp_path):
    path = hf_cases.write("k2", tmp_path)
    index = index_of(path)
    shard = index["weight_map"].pop(NORM)
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"{shard}: tensor '{NORM}': want it in model.safetensors.index.json"):
        Checkpoint(path)


def refused_before_anything_is_allocated(path: Path, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def allocate(*_: object) -> None:
        raise AssertionError("weights or cache were allocated")

    monkeypatch.setattr(Weights, "take", allocate)
    monkeypatch.setattr(Weights, "matrix", allocate)
    monkeypatch.setattr(shard, "PagedCache", allocate)
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        Shard.load(str(path), Solo(), "float32", 1, lambda done, total: None)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("name", "tensor"), [("fp8", f"{KV_A}_scale_inv"), ("k2_int4", f"{DOWN}_scale")])
def test_scales_that_are_no_numbers(name, tensor, bad, tmp_path, monkeypatch):
    def change(tensors: hf_cases.Stored) -> None:
        dtype, values = tensors[tensor]
        values = values.copy()
        values[1, 1] = hf_cases.bf16(np.float32(bad)[None])[0] if dtype == "BF16" else bad
        tensors[tensor] = dtype, values

    path = changed(name, tmp_path, change)
    complaint = f"tensor '{tensor}': scales: want finite numbers, found {bad} (1 such)"
    refused_before_anything_is_allocated(path, complaint, monkeypatch)


def test_a_shape_that_the_file_says_otherwise(tmp_path, monkeypatch):
    def change(tensors: hf_cases.Stored) -> None:
        tensors[f"{DOWN}_shape"] = "I64", np.array([128, 64])

    path = changed("k2_int4", tmp_path, change)
    complaint = f"'{DOWN}_shape': values: want [64, 128], found [128, 64]"
    refused_before_anything_is_allocated(path, complaint, monkeypatch)


def test_what_is_skipped_is_said_once(tmp_path, capsys):
    notes = plan(EngineConfig(str(hf_cases.write("k25", tmp_path / "a")))).notes
    assert notes[0] == "not loaded: vision tower (1 tensors, 256 bytes), vision projector (1 tensors, 256 bytes)"
    assert re.fullmatch(r"weights: INT4 become float32, \S+ MB on a rank, .* GB of memory are available", notes[1])
    notes = plan(EngineConfig(str(hf_cases.write("v3", tmp_path / "b")))).notes
    assert notes == ("not loaded: multi-token prediction layer 3 (4 tensors, 1.02 kB)",)
    assert main(["generate", "--model", str(tmp_path / "b"), "--prompt-tokens", "1", "--max-tokens", "2"]) == 0
    assert capsys.readouterr().err.count("not loaded: ") == 1


@pytest.mark.parametrize("name", hf_cases.VARIANTS)
def test_parts_make_the_whole_and_bytes_add_up(name, tmp_path):
    path = hf_cases.write(name, tmp_path)
    with open_model(path) as source:
        for size in source.legal_tp():
            told: list[tuple[int, int]] = []
            tell = partial(lambda told, *done: told.append(done), told)
            ranks = [Weights(source, r, size, "float32", tell) for r in range(size)]
            for key, param in parameters(source.config).items():
                parts = [rank.take(key) for rank in ranks]
                assert [tuple(part.shape) for part in parts] == [param.held(r, size) for r in range(size)]
            assert told[-1][0] == told[-1][1] == source.nbytes(size - 1, size)
            assert len([done for done, _ in told if done]) <= 257 * size
            looked_at = hf_cases.VARIANTS[name].quantized != ""
            assert any(done == 0 for done, _ in told) == looked_at


@pytest.mark.parametrize("rank", [0, 1])
def test_int4_as_it_stays_means_the_same_values(rank, tmp_path):
    """What a GPU is given, before its kernel's own packing."""
    with open_model(hf_cases.write("k25", tmp_path)) as source:
        weights = Weights(source, rank, 2, "float32", lambda done, total: None)
        for names in (("w_gate", "w_up"), ("w_down",)):
            names = tuple(f"layers.2.experts.{name}" for name in names)
            values, (words, scales) = weights.matrix(*names), weights.int4(*names)
            for expert in range(len(words)):
                assert torch.equal(unpacked(words[expert], scales[expert]).T, values[expert])


@pytest.mark.parametrize("name", ["v2_lite", "v3", "fp8", "k2_int4"])
def test_the_layout_of_a_gpu_holds_the_same_values(name, tmp_path):
    with open_model(hf_cases.write(name, tmp_path)) as source:
        weights = Weights(source, 1, 2, "bfloat16", lambda done, total: None)
        for key, param in parameters(source.config).items():
            if len(param.shape) > 1 and key != "embed":
                values = weights.matrix(key)
                other = torch.empty(values.mT.shape, dtype=values.dtype).mT
                assert torch.equal(weights._filled(other, (key,)), values), key
