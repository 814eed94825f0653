"""The pair that ships: what is in it, by which name it goes, and DDTree == chain == AR with it."""

from __future__ import annotations

import fnmatch
import json
import tomllib
from contextlib import closing

import pytest

from kdtp import Engine, SamplingParams, pair
from kdtp.__main__ import main
from kdtp.config import DrafterConfig, EngineConfig
from kdtp.engine.plan import plan
from kdtp.model.weights.hf import Checkpoint
from kdtp.train import config as recipes
from tests import pair_cases
from tests.conftest import ROOT
from tests.processes import TINY

pytestmark = pytest.mark.timeout(180)
MOST_BYTES = 16_000_000
TREE = DrafterConfig("dflash", model=pair.NAME)


@pytest.mark.parametrize(
    ("tp", "ways"),
    [
        pytest.param(1, list(pair_cases.WAYS), marks=pytest.mark.xdist_group("pair-tp1")),
        pytest.param(
            2, ["budget 4", "budget 16", "budget 64", "chain", "merged"], marks=pytest.mark.xdist_group("pair-tp2")
        ),
    ],
)
def test_every_way_gives_the_text_and_the_bits_of_plain_decoding(tp, ways):
    """Every budget, a batch with chunked prompts, greedy and sampled; and the drafter is worth having."""
    with closing(pair_cases.harness(tp)) as ranks:
        for temperature in (0.0, 0.8):
            found = pair_cases.check(ranks, temperature, ways, tokens=16)
            assert found["budget 16"] > found["chain"] > 1.8 and found["budget 16"] > found["budget 4"], found
            assert found.get("budget 0", 1.0) == 1.0


def test_both_are_small_and_all_their_files_ship():
    folder = ROOT / "kdtp/pair"
    files = {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and "pycache" not in str(path)
    }
    assert sum((folder / name).stat().st_size for name in files) <= MOST_BYTES
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["kdtp.pair"]
    packed = {name for name in files if any(fnmatch.fnmatch(name, glob) for glob in globs)}
    assert files - packed == {"__init__.py"}
    assert {"target/MODEL_CARD.md", "drafter/MODEL_CARD.md", "LICENSE.txt"} <= packed


def test_it_is_of_the_recipes_that_ship():
    """Whoever trains with them gets networks of this form; experts are stored in INT4."""
    with Checkpoint(pair.TARGET) as target:
        assert target.forms["INT4"] > 0
    for folder, recipe in ((pair.TARGET, "target"), (pair.DRAFTER, "drafter-v2")):
        stored = json.loads((folder / "config.json").read_text())
        model = json.loads((recipes.RECIPES / f"{recipe}.json").read_text())["model"]
        nested = model.pop("dflash_config", {})
        assert model.items() <= stored.items() and nested.items() <= stored.get("dflash_config", {}).items()


def test_it_goes_by_its_name(capsys):
    checked = plan(EngineConfig(pair.NAME, drafter=TREE))
    assert checked.config.model == str(pair.TARGET) and checked.config.drafter.model == str(pair.DRAFTER)
    with Engine(pair.NAME) as engine:
        (done,) = engine.generate([pair_cases.prompts()[0]], SamplingParams(max_tokens=5))
    flags = ("--model", "pair", "--threads", "1", "--max-tokens", "5", pair_cases.TEXTS[0])
    assert main(["generate", *flags, "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["tokens"] == list(done.tokens)
    assert main(["generate", *flags, "--echo", "--drafter", "dflash", "--drafter-model", "pair"]) == 0
    assert capsys.readouterr().out.removesuffix("\n") == pair_cases.TEXTS[0] + out["text"]


def test_a_folder_of_that_name_is_another_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "--model", "./pair", "--prompt-tokens", "1"]) == 2
    assert "'./pair': must be a KDTR model file or a model folder" in capsys.readouterr().err


def test_its_drafter_is_for_its_target(capsys):
    flags = ("--drafter", "dflash", "--drafter-model", "pair")
    assert main(["generate", "--model", str(TINY), *flags]) == 2
    assert "vocab_size = 3072: the model's is 512; this drafter is another model's" in capsys.readouterr().err
    assert main(["generate", "--model", "pair", "--drafter", "oracle", "--prompt-tokens", "1"]) == 2
    assert "target holds no golden tokens to know" in capsys.readouterr().err
