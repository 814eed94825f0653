"""`kdtp convert`: a published folder into a KDTR file, with golden tokens if wanted, and a KDTR file into a folder."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdtp.cli.flags import token_ids
from kdtp.config import DTYPES, ConfigError, ModelConfig
from kdtp.log import amount
from kdtp.model.weights import hf_write, kdtr
from kdtp.model.weights.hf import Checkpoint
from kdtp.model.weights.hf_sizes import available_memory, weight_bytes
from kdtp.model.weights.table import parameters

Arrays = dict[str, NDArray[Any]]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("source", type=Path, help="a model folder as published, or a KDTR file")
    parser.add_argument("target", type=Path, help="the KDTR file to write, or an empty or new folder")
    parser.add_argument(
        "--golden-prompt",
        type=token_ids,
        metavar="ID,ID,…",
        help="into a KDTR file: also store what the numpy reference answers (slow; for small models)",
    )
    parser.add_argument("--golden-tokens", type=int, metavar="N", help="how many tokens of it (default 24)")
    parser.add_argument("--dtype", choices=DTYPES, help="of the tensors of a folder (default bfloat16)")


def run(chosen: argparse.Namespace) -> int:
    """Convert, and say what was written."""
    if chosen.source.is_dir():
        _refuse(chosen, dtype="goes with a KDTR file as source: KDTR holds float32")
        if chosen.golden_prompt is None:
            _refuse(chosen, golden_tokens="goes with --golden-prompt")
        _to_kdtr(chosen)
    else:
        text = "goes with a folder as source"
        _refuse(chosen, golden_prompt=text, golden_tokens=text)
        _to_folder(chosen.source, chosen.target, chosen.dtype or "bfloat16")
    return 0


def _refuse(chosen: argparse.Namespace, **flags: str) -> None:
    for name, text in flags.items():
        if getattr(chosen, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: {text}")


def _to_kdtr(chosen: argparse.Namespace) -> None:
    with Checkpoint(chosen.source) as checkpoint:
        need, free = weight_bytes(checkpoint, 0, 1, "cpu", "float32"), available_memory()
        if need > free:
            raise ConfigError(f"{chosen.source}: {amount(need)} in float32, and {amount(free)} of memory are available")
        skipped = ", ".join(map(str, checkpoint.skipped))
    arrays, config = _arrays(chosen.source)
    metadata = {"format": "kdtp-model", **_metadata(config)}
    if chosen.golden_prompt is not None:
        arrays |= _golden(metadata, arrays, chosen.golden_prompt, chosen.golden_tokens)
    _write(lambda: kdtr.write(chosen.target, metadata, arrays))
    print(f"{chosen.target}: {len(parameters(config))} parameters" + (f"; left out: {skipped}" if skipped else ""))


def _write(write: Any) -> None:
    try:
        write()
    except OSError as error:
        raise ConfigError(f"{error.filename}: {(error.strerror or str(error)).lower()}") from None


def _arrays(folder: Path) -> tuple[Arrays, ModelConfig]:
    """All parameters, float32."""
    from kdtp.model.weights.load import Weights, open_model  # torch, only needed here

    with open_model(folder) as source:
        weights = Weights(source, 0, 1, "float32", lambda done, total: None)
        return {name: weights.take(name).numpy() for name in parameters(source.config)}, source.config


def _metadata(config: ModelConfig) -> dict[str, kdtr.Value]:
    """The inverse of ModelConfig.from_metadata."""
    fields = dataclasses.asdict(config)
    yarn: Mapping[str, Any] = fields.pop("rope_scaling") or {}
    plain = {f"model.{key}": list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    return plain | {f"model.rope_scaling.{key}": value for key, value in yarn.items()}


def _golden(metadata: dict[str, kdtr.Value], arrays: Arrays, prompt: tuple[int, ...], count: int | None) -> Arrays:
    """What the reference answers; sets the smallest margin in `metadata`."""
    try:
        from reference.config import from_metadata
        from reference.generate import generate
        from reference.model import Model
    except ImportError:
        raise ConfigError("--golden-prompt: needs the package `reference` of the repository; run it there") from None
    config, count = from_metadata(metadata), 24 if count is None else count
    most = config.max_position_embeddings + 1 - len(prompt)
    if not prompt or not all(0 <= token < config.vocab_size for token in prompt):
        raise ConfigError(f"--golden-prompt = {prompt}: must be one id or more in [0, {config.vocab_size})")
    if not 1 <= count <= most:
        raise ConfigError(f"--golden-tokens = {count}: must be 1..{most} after this prompt")
    out = generate(Model(config, arrays), list(prompt), count)
    logits = np.stack(out.logits)
    top = np.sort(logits, -1)
    metadata["golden.min_margin"] = float((top[:, -1] - top[:, -2]).min())
    golden = {"golden.prompt": np.array(prompt, np.int64), "golden.tokens": np.array(out.tokens, np.int64)}
    return golden | {"golden.logits": logits}


def _to_folder(source: Path, target: Path, dtype: str) -> None:
    from kdtp.model.weights.kdtr_model import KdtrModel

    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target}: must be a new or an empty folder")
    try:
        model = KdtrModel(source)
    except OSError as error:
        raise ConfigError(f"{source}: {(error.strerror or str(error)).lower()}") from None
    with model, kdtr.Reader(source) as reader:
        _write(lambda: hf_write.write(target, model.config, reader.array, dtype))
        golden = any(name.startswith("golden.") for name in reader.entries)
    print(
        f"{target}: {model.config.num_hidden_layers} layers in {dtype}" + ("; golden tokens left out" if golden else "")
    )
