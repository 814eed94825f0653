"""`kdtp train` from end to end, tiny: what comes out is a pair that the engine loads, and no run is lost."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kdtp.cli.convert import _arrays
from kdtp.config import DrafterConfig, EngineConfig
from kdtp.engine.api import Engine
from kdtp.model.weights import safetensors
from kdtp.text import tokenizer
from kdtp.train import card, folder, state
from kdtp.train.job_drafter import DrafterJob
from kdtp.train.job_target import TargetJob
from kdtp.train.sample import continuations
from kdtp.types import SamplingParams
from reference.generate import generate
from reference.model import Model
from tests import train_cases as cases
from tests.conftest import ROOT

pytestmark = pytest.mark.xdist_group("train")  # they share the trained target


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Corpus and recipes."""
    at = tmp_path_factory.mktemp("train")
    cases.write_corpus(at / "corpus")
    cases.write_recipe(at / "target.json", cases.TARGET)
    for version, recipe in cases.DRAFTERS.items():
        cases.write_recipe(at / f"drafter{version}.json", recipe)
    return at


def flags(place: Path, *more: str | int) -> list[str]:
    common = ["--recipe", place / "target.json", "--corpus", place / "corpus", "--steps", 20, "--evaluate-every", 8]
    return [str(flag) for flag in (*common, *more)]


@pytest.fixture(scope="module")
def target(place: Path) -> Path:
    out = place / "out"
    assert cases.train("target", out, *flags(place)) == 0
    return out


def drafter_flags(place: Path, target: Path, version: int) -> list[str]:
    recipe = ["--recipe", str(place / f"drafter{version}.json"), "--target", str(target)]
    return [*flags(place)[2:], *recipe]


def test_a_trained_target_is_what_the_reference_and_the_engine_read(target: Path) -> None:
    network = folder.load(target)
    arrays, config = _arrays(target)
    tokens = tokenizer.load(target, config.vocab_size)
    prompt = [*tokens.begin, *tokens.encode("def __init__(self):\n    ")]
    told = generate(Model(config, arrays), prompt, 12)  # type: ignore[arg-type]
    text = continuations(network, torch.tensor([prompt]), len(prompt) + 12, torch.zeros(1), seed=0)[0].tolist()
    count = len(told.tokens)  # an end token ends it
    assert text[len(prompt) :][:count] == told.tokens
    with torch.no_grad():
        logits = network.logits(network.hidden(torch.tensor([text]))[0])[0, len(prompt) - 1 :][:count]
    assert np.abs(logits.numpy() - np.stack(told.logits)).max() < 1e-3
    with Engine.of(EngineConfig(str(target))) as engine:
        (done,) = engine.generate([prompt], SamplingParams(max_tokens=12))
    assert list(done.tokens) == told.tokens


def test_what_is_stored_is_what_was_trained(target: Path) -> None:
    """INT4 loses nothing: training rounds as storing does. The rest is bfloat16, which training on a GPU multiplies."""
    trained, stored = folder.build(cases.MODEL, "recipe"), folder.load(target)
    tensors, _ = state.read(target / "training" / "checkpoint.safetensors", _key(target))
    best = {name.removeprefix("best."): value for name, value in tensors.items() if name.startswith("best.")}
    experts = {name: value for name, value in best.items() if ".experts." in name}
    rounded = {name: value.bfloat16().float() for name, value in best.items()} | experts
    rounded |= {name: value for name, value in best.items() if name.endswith("bias")}
    assert len(experts) == 4 and any(value.any() for name, value in best.items() if name.endswith("bias"))
    trained.load_state_dict(rounded)
    text = torch.randint(384, (2, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, want = (net.eval().logits(net.hidden(text)[0]) for net in (trained, stored))
    assert (found - want).abs().max() < 1e-3


def _key(target: Path) -> str:
    file = safetensors.File(target / "training" / "checkpoint.safetensors")
    key = json.loads(file.read("state.json").tobytes())["key"]
    assert isinstance(key, str)
    return key


def test_the_folder_has_card_curve_and_log(target: Path) -> None:
    text = (target / "MODEL_CARD.md").read_text()
    for said in ("held-out", "20 of 128 tokens", "PSF License", "textwrap", "kdtp train target", card.size(target)[:2]):
        assert said in text, said
    assert (target / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list(cases.losses(target)) == list(range(1, 21))
    first, *_, last = cases.losses(target).values()
    assert last < first - 0.1


class Stop(Exception):
    """As if the process had been killed."""


def _at_step(monkeypatch: pytest.MonkeyPatch, job: type, step: int, what: object) -> None:
    """Let something happen in the middle of a step."""
    loss, calls = job.loss, iter(range(1, 1000))  # type: ignore[attr-defined]

    def changed(self: object, generator: torch.Generator) -> torch.Tensor:
        if next(calls) == step:
            what()  # type: ignore[operator]
        found: torch.Tensor = loss(self, generator)
        return found

    monkeypatch.setattr(job, "loss", changed)


def _die() -> None:
    raise Stop


# Killed by the system in the middle of its second checkpoint.
_KILLED = """
import os, signal, sys
from kdtp.model.weights import safetensors
from tests import train_cases
chunks, saves = safetensors._chunks, []

def dying(tensors):
    saves.append("state.json" in tensors)
    for i, chunk in enumerate(chunks(tensors)):
        yield chunk
        if i == 9 and sum(saves) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

safetensors._chunks = dying
train_cases.train("target", *sys.argv[1:])
"""


def test_a_killed_run_and_a_full_disk_lose_one_interval(
    target: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever befell it, the run comes to the same end, bit for bit."""
    out, given = place / "killed", flags(place, "--checkpoint-every", 6)
    checkpoint = out / "training" / "checkpoint.safetensors"
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(out), *given], cwd=ROOT, timeout=100)
    assert ended.returncode == -signal.SIGKILL
    assert _step(checkpoint) == 6 and max(cases.losses(out)) == 12
    (part,) = checkpoint.parent.glob("*.part")
    assert 0 < part.stat().st_size < checkpoint.stat().st_size and not (out / "model.safetensors").exists()
    log = out / "training" / "loss.jsonl"
    log.write_text(log.read_text() + '{"step": 12, "lo')  # a line that was being written

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    with monkeypatch.context() as patch:  # from step 13 on no file may have more than 64 KiB
        _at_step(patch, TargetJob, 7, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1])))
        assert cases.train("target", out, *given) == 2
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        f"kdtp train: {checkpoint}: file too large; the same command goes on from the checkpoint"
        in capsys.readouterr().err
    )
    assert _step(checkpoint) == 12 and not list(checkpoint.parent.glob("*.part"))

    with monkeypatch.context() as patch:
        _at_step(patch, TargetJob, 9, _die)  # 8 steps are left
        assert cases.train("target", out, *given) == 0
    assert cases.losses(out) == cases.losses(target)
    assert (out / "model.safetensors").read_bytes() == (target / "model.safetensors").read_bytes()


def _step(checkpoint: Path) -> int:
    file = safetensors.File(checkpoint)
    step = json.loads(file.read("state.json").tobytes())["step"]
    assert isinstance(step, int)
    return step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_a_checkpoint(
    target: Path,
    place: Path,
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    out = place / number.name
    with monkeypatch.context() as patch:
        _at_step(patch, TargetJob, 5, lambda: os.kill(os.getpid(), number))
        assert cases.train("target", out, *flags(place)) == 130
    error = capfd.readouterr().err
    assert "ending after this step" in error and "stopped after step 5" in error
    assert cases.train("target", out, *flags(place)) == 0
    assert cases.losses(out) == cases.losses(target)


def test_a_checkpoint_of_another_run_is_refused(target: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cases.train("target", target, *flags(place, "--seed", 1)) == 2
    assert "is of a run with another recipe, seed" in capsys.readouterr().err


def test_a_folder_that_is_not_for_this_run(target: Path, place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No model is lost to a wrong --out, and two processes never write one run."""
    other = place / "published"
    other.mkdir()
    shutil.copy(target / "model.safetensors", other)
    assert cases.train("target", other, *flags(place)) == 2
    assert f"--out = {other}: has a model.safetensors, of no run to go on with" in capsys.readouterr().err
    assert cases.train("drafter", target, *drafter_flags(place, target, 1)) == 2
    assert f"--out = {target}: is the target's folder: must be another" in capsys.readouterr().err
    copied = shutil.copytree(target, place / "copied")
    assert cases.train("drafter", copied, *drafter_flags(place, target, 1)) == 2
    assert "is of a run with another recipe" in capsys.readouterr().err
    assert not (copied / "training" / "samples.safetensors").exists()  # before hours are spent on them
    with state.alone(target / "training"):
        assert cases.train("target", target, *flags(place)) == 2
    assert "another process is training here" in capsys.readouterr().err


def test_a_loss_that_is_no_number(
    target: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loss = TargetJob.loss
    monkeypatch.setattr(TargetJob, "loss", lambda self, generator: loss(self, generator) * float("nan"))
    assert cases.train("target", place / "nan", *flags(place)) == 2
    assert "step 1: the loss is nan; try a learning_rate below 0.003" in capsys.readouterr().err
    assert not (place / "nan" / "training" / "checkpoint.safetensors").exists()


@pytest.fixture(scope="module")
def drafters(target: Path, place: Path) -> dict[int, Path]:
    """By version; their runs were not interrupted."""
    found = {version: place / f"drafter_{version}" for version in cases.DRAFTERS}
    for version, out in found.items():
        assert cases.train("drafter", out, *drafter_flags(place, target, version)) == 0
    return found


@pytest.mark.parametrize("version", [1, 2])
def test_a_trained_drafter_drafts_for_its_target(target: Path, drafters: dict[int, Path], version: int) -> None:
    out = drafters[version]
    assert min(cases.losses(out).values()) < max(cases.losses(out).values()) - 0.1
    assert f"version {version}" in (out / "MODEL_CARD.md").read_text()
    tokens = tokenizer.load(target)
    prompt = [*tokens.begin, *tokens.encode("import os\n")]
    params, texts = SamplingParams(max_tokens=20, ignore_eos=True), []
    for settings in (DrafterConfig(), DrafterConfig("dflash", block=4, budget=8, model=str(out))):
        with Engine.of(EngineConfig(str(target), drafter=settings)) as engine:
            texts += engine.generate([prompt], params)
    plain, drafted = texts
    assert drafted.tokens == plain.tokens and len(plain.tokens) == 20


def test_a_drafters_run_goes_on_to_the_same_end(
    target: Path, place: Path, drafters: dict[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, given = place / "drafter_killed", [*drafter_flags(place, target, 2), "--checkpoint-every", "10"]
    samples = out / "training" / "samples.safetensors"
    samples.parent.mkdir(parents=True)
    shutil.copy(drafters[2] / "training" / samples.name, samples)
    with monkeypatch.context() as patch:
        _at_step(patch, DrafterJob, 14, _die)
        with pytest.raises(Stop):
            cases.train("drafter", out, *given)
    texts = samples.read_bytes()
    assert cases.train("drafter", out, *given, "--seed", "1") == 2  # and the texts of the run there are not lost
    changed = shutil.copytree(target, place / "changed", ignore=shutil.ignore_patterns("training"))
    settings = (changed / "config.json").read_text()
    (changed / "config.json").write_text(settings.replace('"rope_theta": 10000.0', '"rope_theta": 9999.0'))
    other = [*drafter_flags(place, changed, 2), "--checkpoint-every", "10"]
    assert cases.train("drafter", out, *other) == 2  # nor for a target of the same weights
    assert samples.read_bytes() == texts
    assert cases.train("target", out, *flags(place)) == 2
    assert not (out / "tokenizer.json").exists()
    assert cases.train("drafter", out, *given) == 0
    assert cases.losses(out) == cases.losses(drafters[2]) and max(cases.losses(out)) == 20
    assert (out / "model.safetensors").read_bytes() == (drafters[2] / "model.safetensors").read_bytes()


def test_bad_input_is_refused_before_training(place: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty, few = place / "empty", place / "few"
    empty.mkdir()
    few.mkdir()
    (few / "bisect.py").write_text("name = other\n" * 100)
    wrong = cases.write_recipe(
        place / "wrong.json", {"model": cases.MODEL | {"n_group": 2}, "train": cases.TARGET["train"]}
    )
    odd = cases.write_recipe(place / "odd.json", {**cases.TARGET, "train": {**cases.TARGET["train"], "batsh": 3}})
    many = cases.write_recipe(place / "many.json", {**cases.TARGET, "model": cases.MODEL | {"vocab_size": 65537}})
    for given, said in (
        (["--corpus", empty], "0 characters of Python source to train on: must be at least 1000"),
        (
            ["--corpus", few],
            "to hold out: must be at least 1000; 0 of 1 modules are held out, by a hash of their names",
        ),
        (["--corpus", empty / "none"], "empty/none: must be a folder, of Python source"),
        (["--recipe", wrong], "n_group = 2: a model to train has"),
        (["--recipe", odd], "batsh"),
        (["--recipe", many], "model: vocab_size = 65537: must be 260..65536, to train a tokenizer for it"),
        (["--recipe", empty / "none.json"], "none.json: no such file"),
        (["--seq", "97"], "train.seq = 97: must be at most max_position_embeddings, 96"),
        (["--batch", "0"], "kdtp train: --batch: train.batch = 0: must be 1.."),
        (["--minutes", "-1"], "--minutes = -1.0: must be at least 0"),
        (["--checkpoint-every", "0"], "--checkpoint-every = 0: must be at least 1"),
        (["--seed", "-1"], "--seed = -1: must be 0.."),
    ):
        assert cases.train("target", place / "no", *flags(place), *given) == 2, said
        assert said in capsys.readouterr().err
    assert not (place / "no").exists()
    if not torch.cuda.is_available():
        assert cases.train("target", place / "no", *flags(place), "--device", "cuda") == 2
        assert "this torch sees no GPU" in capsys.readouterr().err
    d = cases.DRAFTERS[2]
    for part, values, said in (
        ("train", {"temperatures": [0.5, -1]}, "train.temperatures = -1.0: must be 0..10"),
        ("train", {"anchors": 45}, "train.anchors = 45: must be 1..44 with seq 48 and block 4"),
        ("train", {"prompt": 46}, "train.prompt = 46: must be 1..45 with seq 48 and block 4"),
        ("model", {"dflash_config": 3}, "dflash_config = 3: must be an object"),
    ):
        path = cases.write_recipe(place / "odd_drafter.json", {**d, part: d[part] | values})
        given = [*drafter_flags(place, target, 2), "--recipe", path]
        assert cases.train("drafter", place / "no", *given) == 2
        assert said in capsys.readouterr().err
    too_long = drafter_flags(place, Path("pair"), 1)  # the target that ships, which takes this many tokens
    assert cases.train("drafter", place / "no", *too_long, "--seq", "2049") == 2
    assert "train.seq = 2049: must be 5..2048 with this target" in capsys.readouterr().err
    assert cases.train("drafter", place / "no", *drafter_flags(place, place / "nowhere", 1)) == 2
    assert "nowhere" in capsys.readouterr().err
