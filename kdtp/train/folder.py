"""A target as a published folder: Kimi's layout, experts in INT4, all else in bfloat16."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdtp import files
from kdtp.config import ConfigError
from kdtp.model.weights import hf_config, safetensors
from kdtp.model.weights.hf import SINGLE, Checkpoint
from kdtp.model.weights.hf_config import CONFIG, GENERATION
from kdtp.model.weights.hf_model import unpacked
from kdtp.model.weights.hf_table import Origin
from kdtp.train import int4
from kdtp.train.target import Target

Stored = dict[str, tuple[str, NDArray[Any]]]
_GROUP: dict[str, Any] = {
    "input_activations": None,
    "output_activations": None,
    "targets": ["Linear"],
    "weights": {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": int4.GROUP,
        "num_bits": 4,
        "observer": "minmax",
        "observer_kwargs": {},
        "strategy": "group",
        "symmetric": True,
        "type": "int",
    },
}
_INT4 = {
    "config_groups": {"group_0": _GROUP},
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}


def build(values: Mapping[str, Any], source: str, dropout: float = 0.0) -> Target:
    """A new target of a config.json."""
    config = hf_config.parse(values, source)
    return Target(config.model, config.tied, dropout)


def write(folder: Path, config: Mapping[str, Any], target: Target, begin: int, end: int) -> None:
    """Write config.json, generation_config.json and model.safetensors; begin, end: control tokens."""
    ends = {"bos_token_id": begin, "eos_token_id": end}
    write_json(folder / CONFIG, {**config, **ends, "quantization_config": _INT4})
    write_json(folder / GENERATION, ends)
    safetensors.write(folder / SINGLE, tensors(target))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """An object, for people to read."""
    files.write(path, json.dumps(value, indent=2) + "\n")


def tensors(target: Target) -> Stored:
    """What model.safetensors holds."""
    stored: Stored = {}
    for name, value in target.state_dict().items():
        at, _, kind = name.rpartition(".")
        if kind == "gate_up":
            for part, values in zip(("gate", "up"), value.chunk(2, 1), strict=True):
                stored |= _experts(at, part, values)
        elif kind == "down":
            stored |= _experts(at, "down", value)
        else:
            stored[name] = ("F32", value.float().cpu().numpy()) if kind.endswith("bias") else ("BF16", bf16(value))
    return stored


def _experts(at: str, part: str, stacked: Tensor) -> Stored:
    numbers, scales = int4.quantise(stacked)
    stored: Stored = {}
    for expert, (q, scale) in enumerate(zip(numbers, scales, strict=True)):
        name = f"{at}.{expert}.{part}_proj.weight"
        stored[f"{name}_packed"] = "I32", int4.words(q).cpu().numpy()
        stored[f"{name}_scale"] = "BF16", bf16(scale)
        stored[f"{name}_shape"] = "I32", np.array(q.shape, np.int32)
    return stored


def bf16(values: Tensor) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16 values."""
    bits: NDArray[np.uint16] = values.detach().bfloat16().contiguous().view(torch.int16).cpu().numpy().view(np.uint16)
    return bits


def load(folder: Path) -> Target:
    """The target of a folder, to be run and not to be trained on; float32, of the values that are stored.

    Raises ConfigError for a model that `Target` cannot be or FP8, CheckpointError as hf.Checkpoint.
    """
    with Checkpoint(folder) as checkpoint:
        target = Target(checkpoint.model, checkpoint.config.tied)
        found = {o.tensor: _values(checkpoint, o) for group in checkpoint.origins.values() for o in group}
    for i, is_moe in enumerate(target.config.is_moe):
        at = f"model.layers.{i}.mlp.experts"
        if is_moe:
            each = {p: _stacked(found, at, p, target.config.n_routed_experts) for p in ("gate", "up", "down")}
            found |= {f"{at}.gate_up": torch.cat([each["gate"], each["up"]], 1), f"{at}.down": each["down"]}
    target.load_state_dict(found)
    for experts in target.experts:
        experts.quantised = True
    return target.requires_grad_(False).eval()


def _stacked(found: dict[str, Tensor], at: str, part: str, experts: int) -> Tensor:
    return torch.stack([found.pop(f"{at}.{expert}.{part}_proj.weight") for expert in range(experts)])


def _values(checkpoint: Checkpoint, origin: Origin) -> Tensor:
    form = checkpoint.form(origin)
    if form == "fp8":
        raise ConfigError(f"{checkpoint.path}: tensor {origin.tensor!r}: is FP8; a drafter is trained on INT4 or more")
    if form == "int4":
        words, scale, _ = checkpoint.parts(origin)
        return unpacked(torch.from_numpy(checkpoint.read(words)), _plain(checkpoint, scale))
    return _plain(checkpoint, origin.tensor)


def _plain(checkpoint: Checkpoint, name: str) -> Tensor:
    values = torch.from_numpy(checkpoint.read(name))
    return (
        values.view(torch.int16).view(torch.bfloat16) if checkpoint.stored(name).dtype == "BF16" else values
    ).float()
