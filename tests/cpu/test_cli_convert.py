"""`kdtp convert` there and back: the same weights bit for bit, the same golden text, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from compare import assert_same_bits
from model_cases import RANDOM, write_random

from kdtp.__main__ import main
from kdtp.cli import convert
from kdtp.config import EngineConfig
from kdtp.engine.plan import plan
from kdtp.model.weights import hf_write, kdtr
from kdtp.model.weights.load import Weights, open_model
from kdtp.model.weights.table import parameters
from tests import hf_cases
from tests.paths import TINY, V3


def run(*arguments: object) -> int:
    return main(["convert", *map(str, arguments)])


def weights(path: Path) -> dict[str, torch.Tensor]:
    with open_model(path) as source:
        held = Weights(source, 0, 1, "float32", lambda done, total: None)
        return {name: held.take(name) for name in parameters(source.config)}


@pytest.mark.parametrize("model", [TINY, V3], ids=["tiny", "v3"])
def test_a_kdtr_file_there_and_back(model, tmp_path, capsys):
    assert run(model, tmp_path / "hf", "--dtype", "float32") == 0
    assert capsys.readouterr().out == (
        f"{tmp_path / 'hf'}: {plan(EngineConfig(str(model))).model.num_hidden_layers} layers in float32; "
        "golden tokens left out\n"
    )
    assert plan(EngineConfig(str(tmp_path / "hf"))).model == plan(EngineConfig(str(model))).model
    want = weights(model)
    for name, found in weights(tmp_path / "hf").items():
        assert_same_bits(found, want[name])
    assert run(tmp_path / "hf", tmp_path / "back.kdtr") == 0
    for name, found in weights(tmp_path / "back.kdtr").items():
        assert_same_bits(found, want[name])


@pytest.mark.parametrize("name", RANDOM)
def test_every_kind_of_model_there_and_back(name, tmp_path):
    model = write_random(tmp_path / "m.kdtr", RANDOM[name])
    assert run(model, tmp_path / "hf", "--dtype", "float32") == 0
    want = weights(model)
    for key, found in weights(tmp_path / "hf").items():
        assert_same_bits(found, want[key])


def test_golden_tokens_are_the_reference_s(tmp_path):
    assert run(TINY, tmp_path / "hf", "--dtype", "float32") == 0
    with kdtr.Reader(TINY) as reader:
        prompt, tokens, logits = (np.array(reader.array(f"golden.{kind}")) for kind in ("prompt", "tokens", "logits"))
    flags = ("--golden-prompt", ",".join(map(str, prompt)), "--golden-tokens", 6)
    assert run(tmp_path / "hf", tmp_path / "m.kdtr", *flags) == 0
    golden = plan(EngineConfig(str(tmp_path / "m.kdtr"))).golden
    assert golden is not None and golden.prompt == tuple(prompt) and golden.tokens == tuple(tokens[:6])
    assert (golden.logits == logits[:6]).all()


@pytest.mark.parametrize("name", ["k25", "fp8"])
def test_quantised_models_become_values(name, tmp_path, capsys):
    assert run(hf_cases.write(name, tmp_path / "hf"), tmp_path / "m.kdtr") == 0
    assert "left out: " in capsys.readouterr().out
    want = weights(tmp_path / "hf")
    for key, found in weights(tmp_path / "m.kdtr").items():
        assert_same_bits(found, want[key])


def test_bfloat16_rounds_as_torch_does(tmp_path):
    values = np.random.default_rng(0).standard_normal(10000).astype(np.float32)
    values[:4] = [0.0, -0.0, 1.00390625, 1.01171875]  # ties
    assert (hf_write.bf16(values) == hf_cases.bf16(values)).all()
    assert run(TINY, tmp_path / "hf") == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    want = weights(TINY)
    for name, found in weights(tmp_path / "hf").items():
        assert_same_bits(found, want[name] if name.endswith("bias") else want[name].bfloat16().float())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("{tiny}", "{folder}", "--golden-prompt", "1"), "--golden-prompt: goes with a folder as source"),
        (("{tiny}", "{folder}/m.kdtr"), "m.kdtr: must be a new or an empty folder"),
        (("{tiny}", "{folder}/none/hf"), "none/hf: no such file or directory"),
        (("{folder}/none.kdtr", "{folder}/hf"), "none.kdtr: no such file or directory"),
        (("{hf}", "{folder}/a.kdtr", "--dtype", "float32"), "--dtype: goes with a KDTR file as source"),
        (("{hf}", "{folder}/a.kdtr", "--golden-tokens", "3"), "--golden-tokens: goes with --golden-prompt"),
        (("{hf}", "{folder}/a.kdtr", "--golden-prompt", "67"), "--golden-prompt = (67,): must be one id or more in [0"),
        (("{hf}", "{folder}/a.kdtr", "--golden-prompt", ""), "--golden-prompt = (): must be one id or more"),
        (
            ("{hf}", "{folder}/a.kdtr", "--golden-prompt", "1", "--golden-tokens", "257"),
            "--golden-tokens = 257: must be 1..256 after this prompt",
        ),
        (("{hf}", "{folder}/none/a.kdtr"), "no such file or directory"),
        (("{folder}", "{folder}/a.kdtr"), "config.json: no such file or directory"),
    ],
)
def test_refused(arguments, complaint, tmp_path, capsys):
    hf = hf_cases.write("moonlight", tmp_path / "hf_model")
    (tmp_path / "m.kdtr").write_text("")
    assert run(*(text.format(tiny=TINY, folder=tmp_path, hf=hf) for text in arguments)) == 2
    shown = capsys.readouterr().err
    assert complaint in shown and shown.count("\n") == 1


def test_a_model_that_does_not_fit_in_memory(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(convert, "available_memory", lambda: 100_000)
    assert run(hf_cases.write("moonlight", tmp_path / "hf"), tmp_path / "m.kdtr") == 2
    assert " kB in float32, and 100.00 kB of memory are available" in capsys.readouterr().err
