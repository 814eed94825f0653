"""config.json of published DFlash drafters. No torch here.

A value may stand at the top level or in `dflash_config`, which wins. Every key is either read, or known not to change
what the network computes, or refused by name: an engine that overlooks one drafts badly without a sign of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn

from kdtp.config import ConfigError, HeadDim, Range, Width, YarnConfig, build, check_ranges
from kdtp.model.weights.hf_config import CONFIG, load_json

_NESTED = "dflash_config"
_V1, _V2 = "DFlashDraftModel", "DFlash2DraftModel"
_SELECTOR = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "rms_norm_eps",
)
_OPTIONAL = (
    "num_key_value_heads",
    "head_dim",
    "num_target_layers",
    "attention_bias",
    "input_embedding_scale",
    "output_multiplier",
    "final_logit_softcapping",
    *_SELECTOR,
)
# Read here, and not a field of their own.
_ELSEWHERE = (
    "architectures",
    "layer_types",
    "sliding_window",
    "is_causal",
    "causal",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
)
# Keys that must have one of these values, if they are there: others would be another network.
_ONLY: dict[str, tuple[Any, ...]] = {
    "model_type": ("qwen3", None),
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "use_aux_hidden_state": (True, None),
    "quantization_config": (None,),
}
# Of training, of other software, or of the text: nothing that the network computes depends on them.
_IGNORED = {
    "_name_or_path",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "max_position_embeddings",
    "max_window_layers",
    "pad_token_id",
    "tie_word_embeddings",
    "torch_dtype",
    "transformers_version",
    "use_cache",
    _NESTED,
}
# What tells other families of drafters from DFlash 1 and 2.
_FAMILIES = {
    "markov_rank": "DSpark",
    "projector_type": "a drafter with another projector",
    "attention_mode": "a drafter with latent attention",
    "use_swa": "MiMo",
    "swa_window_size": "MiMo",
    "attention_sink_bias": "MiMo",
}
_YARN = tuple(field.name for field in dataclasses.fields(YarnConfig))


@dataclass(frozen=True)
class DFlashConfig:
    """A DFlash drafter; names as in the published config.json.

    windows, causal: per layer, how far a slot sees (0: everything) and whether it sees earlier ones only.
    rope_amplitude: what cos and sin are multiplied by; None: what YaRN's mscale says. conv_kernel_size, selector_rank
    0: version 1, which has none. num_target_layers 0: not said.
    """

    hidden_size: Width
    intermediate_size: Width
    num_hidden_layers: Annotated[int, Range(1, 256)]
    num_attention_heads: Annotated[int, Range(1, 4096)]
    num_key_value_heads: Annotated[int, Range(1, 4096)]
    head_dim: HeadDim
    vocab_size: Annotated[int, Range(1, 1 << 24)]
    block_size: Annotated[int, Range(2, 65)]
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    rms_norm_eps: Annotated[float, Range(1e-12, 1.0)]
    rope_theta: Annotated[float, Range(2.0, 1e12)]
    rope_scaling: YarnConfig | None = None
    rope_amplitude: float | None = None
    num_target_layers: Annotated[int, Range(0, 1024)] = 0
    attention_bias: bool = False
    input_embedding_scale: Annotated[float, Range(-1e6, 1e6)] = 1.0
    output_multiplier: Annotated[float, Range(-1e6, 1e6)] = 1.0
    final_logit_softcapping: Annotated[float, Range(0.0, 1e6)] = 0.0
    conv_kernel_size: Annotated[int, Range(0, 64)] = 0
    conv_group_size: Annotated[int, Range(0, 1 << 20)] = 0
    selector_rank: Annotated[int, Range(0, 1 << 16)] = 0
    selector_top_k: Annotated[int, Range(0, 64)] = 0

    def __post_init__(self) -> None:
        check_ranges(self)
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        _want(heads % kv_heads == 0, "num_key_value_heads", kv_heads, f"a divisor of {heads} heads")
        _want(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even")
        _want(
            0 <= self.mask_token_id < self.vocab_size, "mask_token_id", self.mask_token_id, f"0..{self.vocab_size - 1}"
        )
        factor = self.rope_amplitude
        _want(factor is None or 0.01 <= factor <= 100.0, "attention_factor", factor, "0.01..100")
        ids, last = self.target_layer_ids, (self.num_target_layers or 1024) - 1
        legal = 1 <= len(ids) <= 64 and all(0 <= i <= last for i in ids)
        _want(legal, "target_layer_ids", ids, f"1..64 layers in 0..{last}")
        for key, each in (("windows", self.windows), ("causal", self.causal)):
            _want(len(each) == self.num_hidden_layers, key, each, f"{self.num_hidden_layers} values")
        _want(all(0 <= w < 1 << 31 for w in self.windows), "sliding_window", self.windows, "at least 1")
        self._check_version_2()

    def _check_version_2(self) -> None:
        given = [key for key in _SELECTOR if getattr(self, key)]
        if given and len(given) < len(_SELECTOR):
            missing = next(key for key in _SELECTOR if key not in given)
            _want(False, missing, getattr(self, missing), f"at least 1, in a drafter with {given[0]}")
        if given:
            legal = self.hidden_size % self.conv_group_size == 0
            _want(legal, "conv_group_size", self.conv_group_size, f"a divisor of hidden_size {self.hidden_size}")
            legal = self.selector_top_k <= self.vocab_size
            _want(legal, "selector_top_k", self.selector_top_k, f"at most vocab_size {self.vocab_size}")

    @property
    def version(self) -> int:
        """1, or 2 with convolution and selector."""
        return 2 if self.selector_rank else 1

    @property
    def features(self) -> int:
        """Width of what the target hands over per token."""
        return len(self.target_layer_ids) * self.hidden_size

    def legal_tp(self) -> list[int]:
        """Sizes that split heads, MLP and features evenly (the vocabulary is padded)."""
        width = math.gcd(self.num_key_value_heads, self.intermediate_size, self.features)
        return [n for n in range(1, width + 1) if width % n == 0]


def is_one(folder: Path) -> bool:
    """Whether a folder says that it is a DFlash drafter, sound or not. ConfigError if it has no config.json to read."""
    values = load_json(folder / CONFIG)
    return _NESTED in values or any(name in str(values.get("architectures")) for name in (_V1, _V2))


def read(folder: Path, amplitude: float | None = None, window: int = 0) -> DFlashConfig:
    """The configuration of a drafter's folder. ConfigError names file, key, value and what is legal.

    amplitude: of cos and sin, unless the file says `attention_factor`; None: by its mscale, as transformers does.
    window: a layer sees at most so many tokens; 0: as the file says.
    """
    path = folder / CONFIG
    return parse(load_json(path), str(path), amplitude, window)


def parse(values: Mapping[str, Any], source: str, amplitude: float | None = None, window: int = 0) -> DFlashConfig:
    """As `read`, of what stands in config.json; `source` names it."""
    found = _flat(values, source)
    _check_keys(found, source)
    for key in _NEEDED:
        if found.get(key) is None:
            raise ConfigError(f"{source}: {key}: is missing", key)
    fields = {key: found[key] for key in (*_NEEDED, *_OPTIONAL) if found.get(key) is not None}
    heads = fields["num_attention_heads"]
    fields.setdefault("num_key_value_heads", heads)
    if "head_dim" not in fields:
        legal = type(heads) is int and heads > 0 and type(fields["hidden_size"]) is int
        fields["head_dim"] = fields["hidden_size"] // heads if legal else 0
    config = build(DFlashConfig, fields | _layers(found, window, source) | _rope(found, amplitude, source), source)
    architecture = found.get("architectures", [{1: _V1, 2: _V2}[config.version]])
    if architecture != [{1: _V1, 2: _V2}[config.version]]:
        _refuse(source, "architectures", architecture, f"[{_V1}], or [{_V2}] with {', '.join(_SELECTOR)}")
    return config


def _want(ok: bool, key: str, value: object, legal: str) -> None:
    if not ok:
        raise ConfigError(f"{key} = {str(value)[:200]}: must be {legal}", key)


def _refuse(source: str, key: str, value: object, legal: str) -> NoReturn:
    raise ConfigError(f"{source}: {key} = {str(value)[:200]}: must be {legal}", key)


def _flat(values: Mapping[str, Any], source: str) -> dict[str, Any]:
    nested = values.get(_NESTED, {})
    if not isinstance(nested, dict):
        _refuse(source, _NESTED, nested, "an object")
    return {**values, **nested}


def _check_keys(found: Mapping[str, Any], source: str) -> None:
    for key, family in _FAMILIES.items():
        if found.get(key) is not None:
            _refuse(source, key, found[key], f"absent: this is {family}, not DFlash")
    for key, legal in _ONLY.items():
        if key in found and found[key] not in legal:
            _refuse(source, key, found[key], str(legal[0]))
    known = {*_NEEDED, *_OPTIONAL, *_ELSEWHERE, *_ONLY, *_IGNORED, *_FAMILIES}
    for key in found:
        if key not in known:
            raise ConfigError(f"{source}: unknown key {key!r}; it might change what the drafter computes", key)


def _layers(found: Mapping[str, Any], window: int, source: str) -> dict[str, Any]:
    """windows and causal: what one flag says of all layers, or else sliding layers are causal and full ones not."""
    count = found["num_hidden_layers"]
    if type(count) is not int or not 1 <= count <= 256:
        _refuse(source, "num_hidden_layers", count, "an integer in 1..256")
    kinds = found.get("layer_types") or ["full_attention"] * count
    if not isinstance(kinds, list) or any(k not in ("full_attention", "sliding_attention") for k in kinds):
        _refuse(source, "layer_types", kinds, "a list of full_attention and sliding_attention")
    if len(kinds) != count:
        _refuse(source, "layer_types", kinds, f"of num_hidden_layers, {count}")
    sliding = [kind == "sliding_attention" for kind in kinds]
    size = found.get("sliding_window")
    if any(sliding) and (type(size) is not int or size < 1):
        _refuse(source, "sliding_window", size, "at least 1, with sliding_attention layers")
    flags = [found[key] for key in ("is_causal", "causal") if found.get(key) is not None]
    if any(type(flag) is not bool or flag != flags[0] for flag in flags):
        _refuse(source, "is_causal and causal", flags, "true or false, alike")
    windows = [min(filter(None, (size if slides else 0, window)), default=0) for slides in sliding]
    return {"windows": windows, "causal": flags[:1] * len(sliding) or sliding}


def _rope(found: Mapping[str, Any], amplitude: float | None, source: str) -> dict[str, Any]:
    """rope_theta, rope_scaling and rope_amplitude, from either spelling."""
    key = next((k for k in ("rope_parameters", "rope_scaling") if found.get(k) is not None), "rope_scaling")
    rope = found.get(key) or {}
    if not isinstance(rope, dict):
        _refuse(source, key, rope, "an object")
    theta = rope.get("rope_theta", found.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{source}: rope_theta: is missing", "rope_theta")
    kinds = {"type", "rope_type", "rope_theta", "truncate", "attention_factor", "partial_rotary_factor"}
    if unknown := sorted(rope.keys() - {*_YARN, *kinds}):
        _refuse(source, f"{key}.{unknown[0]}", rope[unknown[0]], "absent: no such setting is known")
    for name, legal in (("truncate", True), ("partial_rotary_factor", 1.0)):
        if rope.get(name, legal) not in (legal, None):
            _refuse(source, f"{key}.{name}", rope[name], f"absent or {legal}")
    kind = rope.get("rope_type", rope.get("type"))
    if kind in (None, "default") and "factor" not in rope:
        return {"rope_theta": theta}
    if kind not in ("yarn", "deepseek_yarn"):
        _refuse(source, f"{key}.rope_type", kind, "yarn or deepseek_yarn")
    yarn = build(YarnConfig, {name: rope[name] for name in _YARN if rope.get(name) is not None}, f"{source}: {key}")
    said = rope.get("attention_factor")
    return {
        "rope_theta": theta,
        "rope_scaling": dataclasses.asdict(yarn),
        "rope_amplitude": amplitude if said is None else said,
    }
