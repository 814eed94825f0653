"""A drafter as a published folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdtp.config import ModelConfig
from kdtp.model.weights import safetensors
from kdtp.model.weights.hf import SINGLE
from kdtp.model.weights.hf_config import CONFIG
from kdtp.train.drafter import Drafter
from kdtp.train.folder import bf16, write_json


def complete(recipe: Mapping[str, Any], target: ModelConfig, mask_token_id: int) -> dict[str, Any]:
    """config.json of a recipe's drafter for this target: what the target decides is filled in."""
    nested = recipe.get("dflash_config", {})
    if isinstance(nested, dict):  # what else it may be is refused with the rest
        nested = {**nested, "mask_token_id": mask_token_id}
    return {
        **recipe,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_hidden_layers,
        "max_position_embeddings": target.max_position_embeddings,
        "dflash_config": nested,
    }


def write(folder: Path, config: Mapping[str, Any], drafter: Drafter) -> None:
    """Write config.json and model.safetensors, in bfloat16."""
    write_json(folder / CONFIG, config)
    stored = {name: ("BF16", bf16(value)) for name, value in drafter.state_dict().items()}
    safetensors.write(folder / SINGLE, stored)
