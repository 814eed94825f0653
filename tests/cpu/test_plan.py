"""What is said of a model file before anything is started: paths that are none, golden arrays that cannot be."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kdtp.config import ConfigError, EngineConfig
from kdtp.engine import plan as plans
from kdtp.engine.plan import plan
from kdtp.model.weights import kdtr
from tests.processes import TINY

VOCAB, CONTEXT = 512, 512


def rewritten(tmp_path: Path, arrays: dict[str, Any]) -> str:
    """The tiny model without its weights, golden arrays replaced (None: left out)."""
    with kdtr.Reader(TINY) as reader:
        golden = {name: np.array(reader.array(name)) for name in reader.entries if name.startswith("golden.")}
        changed = golden | {f"golden.{key}": value for key, value in arrays.items()}
        kdtr.write(tmp_path / "m.kdtr", reader.metadata, {k: v for k, v in changed.items() if v is not None})
    return str(tmp_path / "m.kdtr")


def ids(count: int, dtype: type = np.int64) -> np.ndarray:
    return np.ones(count, dtype)


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        (
            {"prompt": np.ones((1, 16), np.int64)},
            "array 'golden.prompt': want integers [1 or more], found int64 [1, 16]",
        ),
        ({"prompt": np.ones(16)}, "array 'golden.prompt': want integers [1 or more], found float64 [16]"),
        ({"prompt": np.int64(3)[None][0:0]}, "array 'golden.prompt': want integers [1 or more], found int64 [0]"),
        ({"prompt": np.array(3)}, "array 'golden.prompt': want integers [1 or more], found int64 []"),
        ({"tokens": ids(24, bool)}, "array 'golden.tokens': want integers [1 or more], found bool [24]"),
        ({"tokens": kdtr.Bf16(ids(24, np.uint16))}, "want integers [1 or more], found bfloat16 [24]"),
        ({"tokens": ids(24) * VOCAB}, "array 'golden.tokens': id 512: must be in [0, 512)"),
        ({"prompt": -ids(4)}, "array 'golden.prompt': id -1: must be in [0, 512)"),
        ({"tokens": ids(25)}, "array 'golden.logits': want float32 [25, 512], found float32 [24, 512]"),
        ({"logits": np.zeros((23, VOCAB), np.float32)}, "want float32 [24, 512], found float32 [23, 512]"),
        ({"logits": np.zeros((24, 511), np.float32)}, "want float32 [24, 512], found float32 [24, 511]"),
        ({"logits": np.zeros((24, VOCAB))}, "want float32 [24, 512], found float64 [24, 512]"),
        ({"logits": np.full((24, VOCAB), np.nan, np.float32)}, "array 'golden.logits': holds NaN or infinity"),
        ({"logits": None}, "has no array 'golden.logits'"),
        ({"tokens": None}, "has no array 'golden.tokens'"),
        ({"prompt": None}, "has no array 'golden.prompt'"),
        ({"prompt": ids(CONTEXT - 22)}, "490 + 24 golden tokens, but the model's context is 512"),
    ],
)
def test_golden_arrays_that_cannot_be(tmp_path: Path, arrays: dict[str, Any], complaint: str) -> None:
    path = rewritten(tmp_path, arrays)
    with pytest.raises(ValueError, match="^" + re.escape(f"{path}: ") + ".*" + re.escape(complaint)):
        plan(EngineConfig(path))


def test_golden_arrays_that_can(tmp_path: Path) -> None:
    golden = plan(EngineConfig(rewritten(tmp_path, {"prompt": ids(CONTEXT - 23, np.uint16)}))).golden
    assert golden is not None and golden.prompt == (1,) * (CONTEXT - 23) and len(golden.tokens) == len(golden.logits)
    assert plan(EngineConfig(rewritten(tmp_path, dict.fromkeys(("prompt", "tokens", "logits"))))).golden is None


def test_paths_that_are_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path, complaint in {
        tmp_path / "none": "no such file or directory",
        tmp_path / "loop": "too many levels of symbolic links",
        TINY / "below": "not a directory",
        tmp_path: "no such file or directory",
        Path("/dev/null"): "not a regular file",
        tmp_path / ("x" * 300): "file name too long",
    }.items():
        with pytest.raises(ValueError, match=re.escape(str(path)) + ".*: " + complaint):
            plan(EngineConfig(str(path)))

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root, who may run this, is refused nothing
    with pytest.raises(
        ConfigError, match=r"model_tiny\.kdtr': must be a KDTR model file or a model folder: permission denied"
    ):
        plan(EngineConfig(str(TINY)))


def test_a_relative_path_becomes_absolute(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TINY.parent)
    assert plan(EngineConfig(TINY.name)).config.model == str(TINY)


def test_waiting_is_busy_on_gpus_with_two_cores_for_each_process(monkeypatch):
    def chosen(cores: int, **settings: Any) -> str:
        monkeypatch.setattr(plans.os, "sched_getaffinity", lambda pid: set(range(cores)))
        return plans._busy_wait(EngineConfig("m", **settings))

    assert [chosen(cores, tp=2, device="cuda") for cores in (5, 6)] == ["off", "on"]
    assert chosen(64, tp=2) == chosen(64, device="cuda") == chosen(17, tp=8, device="cuda") == "off"
    assert chosen(1, tp=2, busy_wait="on") == "on" and chosen(64, tp=2, device="cuda", busy_wait="off") == "off"
    assert plan(EngineConfig(str(TINY), tp=2)).config.busy_wait == "off"
    for settings, words in (({"busy_wait": "on"}, "one rank"), ({"busy_wait": "yes", "tp": 2}, "one of auto, on, off")):
        with pytest.raises(ConfigError, match=f"busy_wait = '{settings['busy_wait']}': must be .*{words}"):
            EngineConfig("m", **settings)
