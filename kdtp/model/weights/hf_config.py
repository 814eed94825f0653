"""config.json of the published models: DeepSeek-V2, V3, Moonlight, Kimi K2 and the text part of K2.5 and later.

What the engine cannot do is refused by name; keys that do not change the mathematics are not read. Both spellings of
the rotary embedding are known: `rope_theta` with `rope_scaling`, and the `rope_parameters` of transformers 5.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from kdtp import files
from kdtp.config import ConfigError, ModelConfig, build

CONFIG, GENERATION = "config.json", "generation_config.json"
_WRAPPER = "kimi_k25"
_LARGEST = 1 << 26  # bytes of a JSON file; the index of Kimi K2.5 has 23 MB
# By model_type: scoring_func, topk_method, n_group and topk_group where the file does not say them; files saved by
# transformers 5 leave out the first two.
_ROUTERS = {
    "deepseek_v2": ("softmax", "greedy", 1, 1),
    "deepseek_v3": ("sigmoid", "noaux_tc", 1, 1),
    "kimi_k2": ("sigmoid", "noaux_tc", 1, 1),
}
# Keys that must have one of these values, if they are there: others would be another model.
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "moe_layer_freq": (1,),
    "rope_interleave": (True, None),
    "sliding_window": (None,),
    "add_cross_attention": (False, None),
    "quantization": (None,),
}
_NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
_NEEDED_BY_EXPERTS = (
    "first_k_dense_replace",
    "moe_intermediate_size",
    "num_experts_per_tok",
    "norm_topk_prob",
    "routed_scaling_factor",
)
# Fields of YarnConfig.
_YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_ROPE_KEYS = {*_YARN, "type", "rope_type", "rope_theta", "truncate", "attention_factor", "partial_rotary_factor"}


@dataclass(frozen=True)
class Fp8:
    """Weights in float8_e4m3fn, one float32 scale for each block of rows x columns."""

    rows: int
    columns: int


@dataclass(frozen=True)
class Int4:
    """Weights of 4 bits, packed eight to a word along the input, one bfloat16 scale for `GROUP` of them."""

    GROUP = 32


@dataclass(frozen=True)
class HfConfig:
    """A published model: `family` is its model_type, `wrapped` says that its tensors are named language_model.*.

    mtp_layers: layers behind the model's own that predict further tokens; they are not loaded. tied: the head is the
    embedding.
    """

    model: ModelConfig
    family: str
    wrapped: bool
    mtp_layers: int
    tied: bool
    quantization: Fp8 | Int4 | None


def read(folder: Path) -> HfConfig:
    """The configuration of a model folder. ConfigError names file, key, value and what is legal."""
    path = folder / CONFIG
    return parse(load_json(path), str(path), _generation(folder))


def load_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; ConfigError for anything else, and for a key that is there twice."""
    try:
        loaded = json.loads(files.read(path, _LARGEST), object_pairs_hook=files.distinct)
    except OSError as error:
        raise ConfigError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: must be JSON: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: must be a JSON object, found {type(loaded).__name__}")
    return loaded


def _generation(folder: Path) -> tuple[int, ...]:
    """Stop tokens of generation_config.json, which has those of a chat; config.json often has not."""
    path = folder / GENERATION
    return _ends(load_json(path), str(path)) if os.path.lexists(path) else ()


def parse(values: Mapping[str, Any], source: str, more_ends: tuple[int, ...] = ()) -> HfConfig:
    """As `read`, of what stands in config.json; `source` names it. more_ends: stop tokens from elsewhere."""
    wrapped = values.get("model_type") == _WRAPPER
    text = _text_config(values, source) if wrapped else values
    family = text.get("model_type")
    if not isinstance(family, str) or family not in _ROUTERS:
        _refuse(source, "model_type", family, f"one of {', '.join([*_ROUTERS, _WRAPPER])}")
    for key, legal in _ONLY.items():
        if key in text and text[key] not in legal:
            _refuse(source, key, text[key], _said(legal[0]))
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if kv_heads not in (None, heads):
        _refuse(
            source, "num_key_value_heads", kv_heads, f"num_attention_heads, {heads}: latent attention has one latent"
        )
    ends = {*_ends(text, source), *_ends(values, source), *more_ends}
    model = build(ModelConfig, _fields(text, family, source) | {"eos_token_ids": tuple(sorted(ends))}, source)
    shown = values.get("model_type")
    mtp = text.get("num_nextn_predict_layers", text.get("num_mtp_layers")) or 0
    if not isinstance(mtp, int) or not 0 <= mtp <= 64:
        _refuse(source, "num_nextn_predict_layers", mtp, "0..64")
    tied = text.get("tie_word_embeddings", values.get("tie_word_embeddings"))
    quantization = _quantization(values, text, source)
    return HfConfig(model, str(shown), wrapped, mtp, bool(tied), quantization)


def _refuse(source: str, key: str, value: object, legal: str) -> NoReturn:
    raise ConfigError(f"{source}: {key} = {_said(value)}: must be {legal}", key)


def _said(value: object) -> str:
    """As in the file, but short."""
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def _text_config(values: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    text = values.get("text_config")
    if not isinstance(text, dict):
        _refuse(source, "text_config", text, f"an object, in a {_WRAPPER} model")
    return text


def _ends(values: Mapping[str, Any], source: str) -> tuple[int, ...]:
    found = values.get("eos_token_id")
    ends = found if isinstance(found, list) else [found] if found is not None else []
    if not all(type(end) is int for end in ends):
        _refuse(source, "eos_token_id", found, "a token id or a list of them")
    return tuple(ends)


def _fields(text: Mapping[str, Any], family: str, source: str) -> dict[str, Any]:
    """The fields of ModelConfig: null means what it means in the published code, and nothing that counts is guessed."""
    experts = text.get("n_routed_experts") or 0
    needed = (*_NEEDED, *(_NEEDED_BY_EXPERTS if experts else ()))
    for key in needed:
        if text.get(key) is None:
            raise ConfigError(f"{source}: {key}: is missing", key)
    fields = {key: text[key] for key in needed}
    fields |= {key: text.get(key) or 0 for key in ("q_lora_rank", "n_shared_experts", "n_routed_experts")}
    if not experts:
        dense = dict.fromkeys(("moe_intermediate_size", "num_experts_per_tok"), 0)
        return fields | dense | {"first_k_dense_replace": text["num_hidden_layers"]} | _rope(text, source)
    for key, default in zip(("scoring_func", "topk_method", "n_group", "topk_group"), _ROUTERS[family], strict=True):
        fields[key] = default if text.get(key) is None else text[key]
    return fields | _rope(text, source)


def _rope(text: Mapping[str, Any], source: str) -> dict[str, Any]:
    """rope_theta and rope_scaling of ModelConfig, from either spelling."""
    key = next((k for k in ("rope_parameters", "rope_scaling") if text.get(k) is not None), None)
    found = text[key] if key else {}
    if not isinstance(found, dict):
        _refuse(source, str(key), found, "an object")
    theta = found.get("rope_theta", text.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{source}: rope_theta: is missing", "rope_theta")
    fields = {"rope_theta": theta}
    kind = found.get("rope_type", found.get("type"))
    if kind in (None, "default") and not found.keys() & {"factor"}:
        return fields
    if kind not in ("yarn", "deepseek_yarn"):
        _refuse(source, f"{key}.type", kind, "yarn")
    if unknown := sorted(found.keys() - _ROPE_KEYS):
        _refuse(source, f"{key}.{unknown[0]}", found[unknown[0]], f"absent; known are {', '.join(sorted(_ROPE_KEYS))}")
    for name, legal in (("truncate", True), ("attention_factor", None), ("partial_rotary_factor", 1.0)):
        if found.get(name, legal) not in (legal, None):
            _refuse(source, f"{key}.{name}", found[name], f"absent or {_said(legal)}")
    for name in _YARN:  # published code has defaults for some, and not all the same ones
        if found.get(name) is None:
            raise ConfigError(f"{source}: {key}.{name}: is missing", name)
    return fields | {"rope_scaling": {name: found[name] for name in _YARN}}


def _quantization(values: Mapping[str, Any], text: Mapping[str, Any], source: str) -> Fp8 | Int4 | None:
    """From either place: K2.5 has it in text_config only."""
    where = [(place, key) for place in (text, values) for key in ("quantization_config", "compression_config")]
    found = next((place[key] for place, key in where if place.get(key) is not None), None)
    if found is None:
        return None
    if not isinstance(found, dict):
        _refuse(source, "quantization_config", found, "an object")
    method = found.get("quant_method")
    if method == "fp8":
        return _fp8(found, source)
    if method == "compressed-tensors":
        return _int4(found, source)
    _refuse(source, "quantization_config.quant_method", method, "fp8 or compressed-tensors")


def _want(found: Mapping[str, Any], legal: Mapping[str, tuple[Any, ...]], source: str, where: str) -> None:
    for key, values in legal.items():
        if found.get(key) not in values:
            _refuse(source, f"{where}.{key}", found.get(key), _said(values[0]))


def _fp8(found: Mapping[str, Any], source: str) -> Fp8:
    where = "quantization_config"
    _want(found, {"fmt": ("e4m3", None), "activation_scheme": ("dynamic", None)}, source, where)
    block = found.get("weight_block_size")
    legal = isinstance(block, list) and len(block) == 2 and all(type(n) is int and 1 <= n <= 1 << 16 for n in block)
    if not legal:
        _refuse(source, f"{where}.weight_block_size", block, "the rows and columns of a block, such as [128, 128]")
    assert block is not None
    return Fp8(*block)


def _int4(found: Mapping[str, Any], source: str) -> Int4:
    where = "quantization_config"
    _want(found, {"format": ("pack-quantized",), "kv_cache_scheme": (None,)}, source, where)
    groups = found.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(group, dict) for group in groups.values()) or not groups:
        _refuse(source, f"{where}.config_groups", groups, "one group or more")
    for name, group in groups.items():
        at = f"{where}.config_groups.{name}"
        no_activations = {"input_activations": (None,), "output_activations": (None,)}
        _want(group, {"format": ("pack-quantized", None), **no_activations}, source, at)
        weights = group.get("weights")
        if not isinstance(weights, dict):
            _refuse(source, f"{at}.weights", weights, "an object")
        legal: dict[str, tuple[Any, ...]] = {
            "num_bits": (4,),
            "type": ("int",),
            "strategy": ("group",),
            "group_size": (Int4.GROUP,),
            "symmetric": (True,),
            "dynamic": (False, None),
            "actorder": (None,),
            "block_structure": (None,),
        }
        _want(weights, legal, source, f"{at}.weights")
    return Int4()
