"""A model as a published folder: the inverse of weights.hf_table, by that same table. No torch here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdtp import files
from kdtp.config import ModelConfig
from kdtp.model.weights import safetensors
from kdtp.model.weights.hf import SINGLE
from kdtp.model.weights.hf_config import CONFIG
from kdtp.model.weights.hf_table import Origin, origins

Array = NDArray[Any]
_FAMILIES = {
    "softmax": ("deepseek_v2", "DeepseekV2ForCausalLM"),
    "sigmoid": ("deepseek_v3", "DeepseekV3ForCausalLM"),
}
_DTYPES = {"float32": "F32", "bfloat16": "BF16"}


def write(folder: Path, config: ModelConfig, read: Callable[[str], Array], dtype: str) -> None:
    """Write config.json and model.safetensors; `read` gives a parameter of weights.table, float32.

    dtype: float32 or bfloat16, of all but the routing bias, which stays float32. OSError.
    """
    folder.mkdir(exist_ok=True)
    files.write(folder / CONFIG, json.dumps(config_json(config, dtype), indent=1))
    stored = {name: _stored(name, values, dtype) for name, values in tensors(config, read).items()}
    safetensors.write(folder / SINGLE, stored)


def config_json(config: ModelConfig, dtype: str) -> dict[str, Any]:
    """What stands in config.json."""
    values = dataclasses.asdict(config)
    yarn, ends = values.pop("rope_scaling"), values.pop("eos_token_ids")
    family, architecture = _FAMILIES[config.scoring_func]
    return {
        "architectures": [architecture],
        "model_type": family,
        "torch_dtype": dtype,
        **values,
        "q_lora_rank": config.q_lora_rank or None,
        "n_shared_experts": config.n_shared_experts or None,
        "num_key_value_heads": config.num_attention_heads,
        "rope_scaling": None if yarn is None else {"type": "yarn", **yarn},
        "eos_token_id": list(ends),
        "hidden_act": "silu",
        "attention_bias": False,
        "moe_layer_freq": 1,
        "tie_word_embeddings": False,
    }


def tensors(config: ModelConfig, read: Callable[[str], Array]) -> Mapping[str, Array]:
    """float32 tensors by their published names."""
    found: dict[str, Array] = {}
    for name, group in origins(config, tied=False).items():
        values = read(name)
        for origin, part in zip(group, values if ".experts." in name else [values], strict=True):
            tensor = found.setdefault(origin.tensor, np.full(origin.shape, np.nan, np.float32))
            tensor[slice(None) if origin.order is None else origin.order] = _rows(origin, part)
    return found


def _rows(origin: Origin, part: Array) -> Array:
    """The rows of a tensor that a parameter was made of."""
    turned = np.swapaxes(part, -1, -2) if origin.turned else part
    return turned.reshape(-1, turned.shape[-1]) if origin.per_head else turned


def _stored(name: str, values: Array, dtype: str) -> tuple[str, Array]:
    kind = "F32" if name.endswith("bias") else _DTYPES[dtype]
    return kind, values if kind == "F32" else bf16(values)


def bf16(values: Array) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16 values, ties to even; no NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
