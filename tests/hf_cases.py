"""Tiny random checkpoints of every published form, written without the loader's help.

Names, shapes and packings are spelled out here once more, so that the loader is compared with a second reading of the
format. Values are made of PCG64's raw bits and exact operations: the same on every machine.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdtp.model.weights import safetensors

GROUP, BLOCK = 32, 128
Arrays = dict[str, np.ndarray]
Stored = dict[str, tuple[str, np.ndarray]]

_COMMON: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "moe_layer_freq": 1,
    "ep_size": 1,
    "seq_aux": True,
    "aux_loss_alpha": 0.001,
    "pretraining_tp": 1,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "auto_map": {"AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM"},
    "bos_token_id": 0,
    "eos_token_id": 66,
}


def _yarn(factor: float, mscale: float, beta_fast: float = 32) -> dict[str, Any]:
    return {
        "type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": 64,
        "beta_fast": beta_fast,
        "beta_slow": 1,
        "mscale": mscale,
        "mscale_all_dim": mscale,
    }


_V2 = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": _yarn(40, 0.707),
}
_V3 = {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
_LITE = {"q_lora_rank": None, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2}
_GROUPED = {"q_lora_rank": 40, "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2}
_KIMI = {
    "model_type": "kimi_k2",
    "q_lora_rank": 40,
    "n_routed_experts": 12,
    "num_experts_per_tok": 4,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
}
_FULL_V3 = _V3 | _GROUPED | {"routed_scaling_factor": 2.5, "rms_norm_eps": 1e-6, "rope_theta": 10000}
_INT4_WEIGHTS = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
_INT4_GROUP = {"input_activations": None, "output_activations": None, "targets": ["Linear"], "weights": _INT4_WEIGHTS}
INT4 = {
    "config_groups": {"group_0": _INT4_GROUP},
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}


@dataclass(frozen=True)
class Variant:
    """A checkpoint: its config.json (the text part, for a wrapped one), and how its values are stored."""

    config: dict[str, Any]
    seed: int
    dtype: str = "BF16"
    quantized: str = ""
    wrapped: bool = False
    shards: int = 2
    generation: dict[str, Any] = field(default_factory=dict)


VARIANTS = {
    "v2_lite": Variant(
        _COMMON | _V2 | _LITE | {"topk_method": "greedy", "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0},
        seed=1,
        dtype="F32",
        shards=1,
    ),
    "v2": Variant(
        _COMMON
        | _V2
        | _GROUPED
        | {"topk_method": "group_limited_greedy", "n_shared_experts": 2, "routed_scaling_factor": 4.0},
        seed=2,
        dtype="F16",
    ),
    "v3": Variant(_COMMON | _FULL_V3 | {"num_nextn_predict_layers": 1, "rope_scaling": _yarn(40, 1.0)}, seed=3),
    "moonlight": Variant(
        _COMMON | _V3 | _LITE | {"routed_scaling_factor": 2.446, "rms_norm_eps": 1e-5, "rope_theta": 50000.0},
        seed=4,
    ),
    "k2": Variant(
        _COMMON | _V3 | _KIMI | {"rms_norm_eps": 1e-6, "rope_scaling": _yarn(32, 1.0, beta_fast=1)},
        seed=5,
        shards=3,
        generation={"eos_token_id": [65, 66]},
    ),
    "k2_int4": Variant(
        _COMMON
        | _V3
        | _KIMI
        | {"moe_intermediate_size": 128, "rms_norm_eps": 1e-5, "rope_scaling": _yarn(64, 1.0, beta_fast=1)}
        | {"quantization_config": INT4},
        seed=6,
        quantized="int4",
        shards=3,
    ),
    "k25": Variant(
        _COMMON
        | _V3
        | _KIMI
        | {"moe_intermediate_size": 128, "rms_norm_eps": 1e-5, "rope_scaling": _yarn(64, 1.0)}
        | {"quantization_config": INT4, "id2label": {"0": "LABEL_0"}, "torch_dtype": None, "dtype": "bfloat16"},
        seed=27,
        quantized="int4",
        wrapped=True,
        shards=3,
        generation={"eos_token_id": 64},
    ),
    "fp8": Variant(
        _COMMON
        | _FULL_V3
        | {"hidden_size": 160, "kv_lora_rank": 128, "qk_nope_head_dim": 28, "intermediate_size": 192}
        | {"num_nextn_predict_layers": 1, "rope_scaling": _yarn(40, 1.0), "quantization_config": FP8},
        seed=8,
        quantized="fp8",
    ),
    "tied": Variant(_COMMON | _V3 | _LITE | _FULL_V3 | {"tie_word_embeddings": True, "n_group": 2}, seed=9, shards=1),
}


def shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the text model's tensors, as published for a model that is not quantised."""
    hidden, heads, lora, q_lora = (
        config[key] for key in ("hidden_size", "num_attention_heads", "kv_lora_rank", "q_lora_rank")
    )
    nope, rope, v = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        if q_lora:
            yield f"{layer}.self_attn.q_a_proj.weight", (q_lora, hidden)
            yield f"{layer}.self_attn.q_a_layernorm.weight", (q_lora,)
            yield f"{layer}.self_attn.q_b_proj.weight", (heads * (nope + rope), q_lora)
        else:
            yield f"{layer}.self_attn.q_proj.weight", (heads * (nope + rope), hidden)
        yield f"{layer}.self_attn.kv_a_proj_with_mqa.weight", (lora + rope, hidden)
        yield f"{layer}.self_attn.kv_a_layernorm.weight", (lora,)
        yield f"{layer}.self_attn.kv_b_proj.weight", (heads * (nope + v), lora)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, heads * v)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        if i < config["first_k_dense_replace"]:
            yield from _mlp(f"{layer}.mlp", hidden, config["intermediate_size"])
            continue
        experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
        yield f"{layer}.mlp.gate.weight", (experts, hidden)
        if config["scoring_func"] == "sigmoid":
            yield f"{layer}.mlp.gate.e_score_correction_bias", (experts,)
        for expert in range(experts):
            yield from _mlp(f"{layer}.mlp.experts.{expert}", hidden, width)
        yield from _mlp(f"{layer}.mlp.shared_experts", hidden, width * config["n_shared_experts"])
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _mlp(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}.gate_proj.weight", (width, hidden)
    yield f"{prefix}.up_proj.weight", (width, hidden)
    yield f"{prefix}.down_proj.weight", (hidden, width)


# Above 1 where a sharp choice is wanted; see reference.weights.
_GAINS = {"q_proj": 1.5, "q_b_proj": 1.5, "o_proj": 1.5, "gate": 3.0, "lm_head": 2.0}


def _draw(bits: np.random.PCG64, name: str, shape: tuple[int, ...]) -> np.ndarray:
    raw = bits.random_raw(int(np.prod(shape)))
    uniform = ((raw >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - 1).reshape(shape)
    if "norm" in name:
        return 1 + np.float32(0.3) * uniform
    if name.endswith("bias"):
        return np.float32(0.15) * uniform
    kind = name.split(".")[-2]
    fan_in = 1 if kind == "embed_tokens" else shape[-1]
    return np.float32(_GAINS.get(kind, 1.0) * np.sqrt(3 / fan_in)) * uniform


def bf16(values: np.ndarray) -> np.ndarray:
    """Bits of the nearest bfloat16 values, uint16."""
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().view(torch.int16).numpy().view(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    """float32 values of bfloat16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def pack_int4(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantise [out, in] -> q int8 in [-8, 7] [out, in], scales (bfloat16 values) float32 [out, in / 32]."""
    groups = values.reshape(values.shape[0], -1, GROUP)
    scales = from_bf16(bf16(np.abs(groups).max(-1) / np.float32(7.5)))
    q = np.clip(np.rint(groups / scales[..., None]), -8, 7).astype(np.int8)
    return q.reshape(values.shape), scales


def words(q: np.ndarray) -> np.ndarray:
    """int32 [out, in / 8] of q: eight nibbles of q + 8, the first the lowest."""
    out = np.zeros((q.shape[0], q.shape[1] // 8), np.uint32)
    for i in range(8):
        out |= (q[:, i::8].astype(np.int64) + 8).astype(np.uint32) << np.uint32(4 * i)
    return out.view(np.int32)


def quantise_fp8(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float8_e4m3fn bits, uint8 [out, in], and scales float32 of 128 x 128 blocks, ragged at the edges."""
    out, inputs = values.shape
    scales = np.empty((-(-out // BLOCK), -(-inputs // BLOCK)), np.float32)
    bits = np.empty(values.shape, np.uint8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = np.abs(values[block]).max() / np.float32(448)
            scaled = torch.from_numpy(np.ascontiguousarray(values[block] / scales[i, j]))
            bits[block] = scaled.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    return bits, scales


def from_fp8(bits: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 values of FP8 blocks."""
    values = torch.from_numpy(bits).view(torch.float8_e4m3fn).float().numpy()
    grown = scales.repeat(BLOCK, 0).repeat(BLOCK, 1)
    return values * grown[: bits.shape[0], : bits.shape[1]]


def _is_quantized(variant: Variant, name: str) -> bool:
    if variant.quantized == "int4":
        return ".mlp.experts." in name
    plain = ("embed_tokens", "lm_head", "norm", "mlp.gate.")
    return variant.quantized == "fp8" and not any(part in name for part in plain)


def _uneven(variant: Variant, values: np.ndarray) -> np.ndarray:
    """Values whose blocks and groups are of different sizes, so that a scale in the wrong place shows."""
    rows, columns = (BLOCK, BLOCK) if variant.quantized == "fp8" else (1, GROUP)
    places = np.arange(values.shape[0])[:, None] // rows + 2 * (np.arange(values.shape[1]) // columns)
    return values * np.array([0.5, 1.0, 1.5], np.float32)[places % 3]


class Tensors:
    """What a variant's checkpoint holds, and the float32 values that this means."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        bits = np.random.PCG64(variant.seed)
        self.values: Arrays = {}
        self.stored: Stored = {}
        for name, shape in shapes(variant.config):
            self._add(name, _draw(bits, name, shape))

    def _add(self, name: str, values: np.ndarray) -> None:
        if _is_quantized(self.variant, name):
            base, values = name.removesuffix("weight"), _uneven(self.variant, values)
            if self.variant.quantized == "int4":
                q, scales = pack_int4(values)
                self.stored[f"{base}weight_packed"] = "I32", words(q)
                self.stored[f"{base}weight_scale"] = "BF16", bf16(scales)
                self.stored[f"{base}weight_shape"] = "I32", np.array(values.shape, np.int32)
                self.values[name] = q.astype(np.float32) * scales.repeat(GROUP, 1)
            else:
                fp8, scales = quantise_fp8(values)
                self.stored[name], self.stored[f"{name}_scale_inv"] = ("F8_E4M3", fp8), ("F32", scales)
                self.values[name] = from_fp8(fp8, scales)
            return
        dtype = "F32" if name.endswith("bias") else self.variant.dtype
        if dtype == "BF16":
            self.stored[name] = dtype, bf16(values)
            self.values[name] = from_bf16(self.stored[name][1])
        else:
            self.values[name] = values.astype(np.float16 if dtype == "F16" else np.float32).astype(np.float32)
            self.stored[name] = dtype, self.values[name]


def extras(variant: Variant) -> Stored:
    """Tensors that a text model does not load: multi-token prediction, vision, old rotary frequencies."""
    found: Stored = {}
    hidden, layers = variant.config["hidden_size"], variant.config["num_hidden_layers"]
    some = ("BF16", bf16(np.full((2, hidden), np.nan, np.float32)))
    if variant.config.get("num_nextn_predict_layers"):
        for name in ("enorm.weight", "eh_proj.weight", "shared_head.head.weight", "mlp.experts.0.up_proj.weight"):
            found[f"model.layers.{layers}.{name}"] = some
    if variant.wrapped:
        for name in ("vision_tower.encoder.blocks.0.wqkv.weight", "mm_projector.proj.0.weight"):
            found[name] = some
    if variant.config["model_type"] == "deepseek_v2":
        found["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", np.full(8, np.nan, np.float32))
    return found


def config_json(variant: Variant) -> dict[str, Any]:
    """What stands in config.json."""
    text = copy.deepcopy(variant.config)
    if not variant.wrapped:
        return text
    return {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {"vt_hidden_size": 64, "patch_size": 14, "merge_kernel_size": [2, 2]},
        "media_placeholder_token_id": 5,
        "ignore_index": -100,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
    }


def checkpoint(variant: Variant) -> Stored:
    """All tensors, by their published names."""
    stored = Tensors(variant).stored | extras(variant)
    if not variant.wrapped:
        return stored
    bare = ("vision_tower.", "mm_projector.")
    return {name if name.startswith(bare) else f"language_model.{name}": form for name, form in stored.items()}


def write_folder(folder: Path, config: dict[str, Any], tensors: Stored, shards: int = 1) -> Path:
    """config.json and the tensors in one file, or in several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if shards == 1:
        safetensors.write(folder / "model.safetensors", tensors)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:06}.safetensors"
        mine = {name: form for i, (name, form) in enumerate(tensors.items()) if i % shards == shard}
        safetensors.write(folder / file, mine)
        weight_map |= dict.fromkeys(mine, file)
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def write(name: str, folder: Path) -> Path:
    """The checkpoint of a variant, as published."""
    variant = VARIANTS[name]
    write_folder(folder, config_json(variant), checkpoint(variant), variant.shards)
    if variant.generation:
        (folder / "generation_config.json").write_text(json.dumps(variant.generation))
    return folder


def write_plain(name: str, folder: Path) -> Path:
    """The same model in float32, not quantised and not wrapped, for readers that know only that."""
    variant = VARIANTS[name]
    config = copy.deepcopy(variant.config) | {"torch_dtype": "float32"}
    for key in ("quantization_config", "auto_map", "dtype"):
        config.pop(key, None)
    config["model_type"] = {"kimi_k2": "deepseek_v3"}.get(config["model_type"], config["model_type"])
    return write_folder(folder, config, {key: ("F32", v) for key, v in Tensors(variant).values.items()})
