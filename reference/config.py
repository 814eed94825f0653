"""What a model is: the field names of `kdtp.config.ModelConfig`, which are those of the published config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension; lengths in tokens."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V2/V3 or Kimi language model. q_lora_rank 0: queries come from one projection."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    first_k_dense_replace: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    max_position_embeddings: int
    scoring_func: str = "softmax"
    topk_method: str = "greedy"
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: YarnConfig | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_row(self) -> int:
        """Width of one KV row: the latent, then the rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim


def to_metadata(config: ModelConfig) -> dict[str, Any]:
    """The `model.*` metadata of a KDTR file; YaRN as `model.rope_scaling.*`, absent when there is none."""
    fields = dataclasses.asdict(config)
    yarn = fields.pop("rope_scaling") or {}
    metadata = {f"model.{key}": list(value) if isinstance(value, tuple) else value for key, value in fields.items()}
    return metadata | {f"model.rope_scaling.{key}": value for key, value in yarn.items()}


def from_metadata(metadata: Mapping[str, Any]) -> ModelConfig:
    """The inverse of `to_metadata`; keys that do not start with `model.` are skipped."""
    flat = {key.removeprefix("model."): value for key, value in metadata.items() if key.startswith("model.")}
    yarn = {key.removeprefix("rope_scaling."): flat.pop(key) for key in list(flat) if key.startswith("rope_scaling.")}
    flat["norm_topk_prob"] = bool(flat["norm_topk_prob"])
    flat["eos_token_ids"] = tuple(flat["eos_token_ids"])
    flat["rope_scaling"] = YarnConfig(**yarn) if yarn else None
    return ModelConfig(**flat)
