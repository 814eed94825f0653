"""Small random DFlash drafters: one for each thing that a published one may have, as reference and as folder."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from kdtp.model.weights import safetensors
from reference.config import YarnConfig
from reference.dflash import DFlash, DFlashConfig

VOCAB, TAPS = 97, (0, 2, 3)
_YARN = {"factor": 8.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "beta_slow": 1.0}
V1: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 10,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "num_target_layers": 4,
    "block_size": 6,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": list(TAPS)},
}
V2: dict[str, Any] = V1 | {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 5,
    "dflash_config": V1["dflash_config"]
    | {"conv_kernel_size": 3, "conv_group_size": 2, "selector_rank": 5, "selector_top_k": 8},
}
CASES: dict[str, dict[str, Any]] = {
    "v1": V1,
    "one_kv_head": V1 | {"num_key_value_heads": 1},
    "bias": V1 | {"attention_bias": True},
    "causal": V1 | {"is_causal": True},
    "nested_causal": V1 | {"dflash_config": V1["dflash_config"] | {"causal": True}},
    "sliding": V1 | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "sliding_both_ways": V1 | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3, "is_causal": False},
    "yarn": V1 | {"rope_scaling": {"rope_type": "yarn", **_YARN}},
    "kimi": V1 | {"rope_scaling": {"rope_type": "yarn", **_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "deepseek_yarn": V1
    | {"rope_theta": None, "rope_parameters": {"rope_type": "deepseek_yarn", "rope_theta": 500.0, **_YARN}},
    "attention_factor": V1 | {"rope_scaling": {"type": "yarn", **_YARN, "attention_factor": 0.8}},
    "scales": V1
    | {
        "dflash_config": V1["dflash_config"]
        | {"input_embedding_scale": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 4.0}
    },
    "v2": V2,
    "v2_full": V2 | {"layer_types": None, "final_logit_softcapping": 3.0, "attention_bias": True},
}
# What each case means, said once more in the reference's terms.
SAID: dict[str, dict[str, Any]] = {
    "one_kv_head": {"num_key_value_heads": 1},
    "causal": {"causal": (True, True)},
    "nested_causal": {"causal": (True, True)},
    "sliding": {"windows": (4, 0), "causal": (True, False)},
    "sliding_both_ways": {"windows": (3, 3)},
    "yarn": {"rope_scaling": YarnConfig(**_YARN), "rope_amplitude": 1 + 0.1 * math.log(8.0)},
    "kimi": {"rope_scaling": YarnConfig(**_YARN)},
    "deepseek_yarn": {"rope_scaling": YarnConfig(**_YARN), "rope_amplitude": 1 + 0.1 * math.log(8.0)},
    "attention_factor": {"rope_scaling": YarnConfig(**_YARN), "rope_amplitude": 0.8},
    "scales": {"input_embedding_scale": 1.5, "output_multiplier": 0.7, "final_logit_softcapping": 4.0},
    "v2": {"windows": (5, 5)},
    "v2_full": {"final_logit_softcapping": 3.0},
}
_BASE = DFlashConfig(
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=10,
    block_size=6,
    mask_token_id=7,
    windows=(0, 0),
    causal=(False, False),
    rms_norm_eps=1e-5,
    rope_theta=500.0,
)


def case_config(name: str) -> DFlashConfig:
    second = {"conv_kernel_size": 3, "conv_group_size": 2, "selector_rank": 5, "selector_top_k": 8}
    return dataclasses.replace(_BASE, **(second if name.startswith("v2") else {}), **SAID.get(name, {}))


def shapes(c: DFlashConfig, bias: bool, taps: int = len(TAPS), vocab: int = VOCAB) -> dict[str, tuple[int, ...]]:
    """Names and shapes as published, spelled out once more."""
    h, inner = c.hidden_size, c.intermediate_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    table: dict[str, tuple[int, ...]] = {"fc.weight": (h, taps * h), "hidden_norm.weight": (h,), "norm.weight": (h,)}
    for i in range(len(c.windows)):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (h,),
            "post_attention_layernorm.weight": (h,),
            "self_attn.q_proj.weight": (q, h),
            "self_attn.k_proj.weight": (kv, h),
            "self_attn.v_proj.weight": (kv, h),
            "self_attn.o_proj.weight": (h, q),
            "self_attn.q_norm.weight": (c.head_dim,),
            "self_attn.k_norm.weight": (c.head_dim,),
            "mlp.gate_proj.weight": (inner, h),
            "mlp.up_proj.weight": (inner, h),
            "mlp.down_proj.weight": (h, inner),
        }
        if bias:
            layer |= {f"self_attn.{n}_proj.bias": (w,) for n, w in (("q", q), ("k", kv), ("v", kv), ("o", h))}
        if c.conv_kernel_size:
            for kind in ("attention", "mlp"):
                layer[f"{kind}_conv.base_kernel"] = (2, c.conv_kernel_size, h)
                layer[f"{kind}_conv.kernel_projection.weight"] = (2 * c.conv_kernel_size * h // c.conv_group_size, h)
        table |= {f"layers.{i}.{key}": shape for key, shape in layer.items()}
    if c.selector_rank:
        table |= {f"candidate_selector.{s}_codebook": (vocab, c.selector_rank) for s in ("predecessor", "successor")}
        table["candidate_selector.hidden_projection.weight"] = (c.selector_rank, h)
    return table


def draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Sharp enough that a wrong key or position shows, and not so sharp that rounding does."""
    values = rng.standard_normal(shape).astype(np.float32)
    if "norm" in name:
        return 1 + np.float32(0.3) * values
    if len(shape) == 1 or "base_kernel" in name:
        return np.float32(0.3) * values
    gain = 2.0 if "q_proj" in name else 0.5 if "kernel_projection" in name else 1.0
    return values * np.float32(gain / math.sqrt(shape[-1]))


def random_drafter(name: str, seed: int = 0) -> DFlash:
    """The reference of a case; its head's columns are as long as its hidden states, so that logits differ."""
    rng, config = np.random.default_rng(seed), case_config(name)
    table = shapes(config, bool(CASES[name].get("attention_bias")))
    weights = {key: draw(rng, key, shape) for key, shape in table.items()}
    embed = rng.standard_normal((VOCAB, config.hidden_size)).astype(np.float32)
    head = rng.standard_normal((config.hidden_size, VOCAB)).astype(np.float32) * np.float32(0.5)
    return DFlash(config, weights, embed, head)


def write_folder(folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray], prefix: str = "") -> Path:
    """A drafter as published; float32 arrays are stored as F32, uint16 ones as BF16."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kinds = {np.dtype(np.float32): "F32", np.dtype(np.uint16): "BF16", np.dtype(np.int64): "I64"}
    stored = {prefix + name: (kinds[array.dtype], array) for name, array in weights.items()}
    safetensors.write(folder / "model.safetensors", stored)
    return folder
