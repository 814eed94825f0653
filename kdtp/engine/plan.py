"""What an engine needs to know of its model before any process is started. No torch here: bad input fails at once."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdtp.config import ConfigError, EngineConfig, ModelConfig
from kdtp.model.weights import kdtr
from kdtp.types import PAGE_ROWS

FORMAT = "kdtp-model"
LIBRARY = Path(__file__).parents[1] / "kernels" / "lib" / "libkdtp.so"  # as kernels.abi, which needs torch


@dataclass(frozen=True)
class Golden:
    """The continuation that the numpy reference gives: token ids and float32 logits [T, V] that chose them."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: NDArray[Any]


@dataclass(frozen=True)
class Plan:
    """A checked engine: `config` with an absolute model path and the KV size resolved."""

    config: EngineConfig
    model: ModelConfig
    golden: Golden | None


def plan(config: EngineConfig) -> Plan:
    """Check `config` against its model file. ConfigError or KdtrError naming what is wrong and what is legal."""
    path = Path(config.model).resolve()
    if not path.is_file():
        raise ConfigError(f"model = {config.model!r}: must be a KDTR model file; there is no such file")
    if config.device == "cuda":
        _check_cuda()
    with kdtr.Reader(path) as reader:
        if reader.metadata.get("format") != FORMAT:
            raise ConfigError(f"{path}: format is {reader.metadata.get('format')!r}, must be {FORMAT!r}")
        model = ModelConfig.from_metadata(reader.metadata, str(path))
        golden = _golden(reader)
    if config.tp not in model.legal_tp():
        legal = ", ".join(map(str, model.legal_tp()))
        raise ConfigError(f"tp = {config.tp}: {path.name} can be split over {legal} ranks")
    if config.drafter.name == "oracle" and golden is None:
        raise ConfigError(f"drafter = 'oracle': {path.name} holds no golden tokens to know; must be none or ngram")
    resolved = dataclasses.replace(config, model=str(path), kv_tokens=config.pages(model) * PAGE_ROWS)
    return Plan(resolved, model, golden)


def _check_cuda() -> None:
    if not Path("/dev/nvidiactl").exists():
        raise ConfigError("device = 'cuda': this machine has no NVIDIA driver; must be cpu")
    if not LIBRARY.is_file():
        raise ConfigError("device = 'cuda': the kernels are not built; run `kdtp build-kernels`")


def _golden(reader: kdtr.Reader) -> Golden | None:
    if "golden.tokens" not in reader.entries:
        return None
    prompt, tokens, logits = (np.array(reader.array(f"golden.{key}")) for key in ("prompt", "tokens", "logits"))
    return Golden(tuple(prompt.tolist()), tuple(tokens.tolist()), logits)
