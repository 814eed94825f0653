"""Frozen configuration: what a model is, and how an engine runs it.

Keys of a file or message go straight into a constructor, so an unknown key fails by name; every value is checked
where it is made, with an error that names key, value and what is legal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from kdtp.types import PAGE_ROWS

C = TypeVar("C")


class ConfigError(ValueError):
    """A configuration value that cannot be; the text names it and what is legal."""


def _want(ok: bool, key: str, value: object, legal: str) -> None:
    if not ok:
        raise ConfigError(f"{key} = {value!r}: must be {legal}")


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (config.json `rope_scaling`): all lengths in tokens."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    def __post_init__(self) -> None:
        _want(self.factor >= 1.0, "rope_scaling.factor", self.factor, "at least 1")
        legal = self.original_max_position_embeddings >= 1
        _want(
            legal, "rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings, "at least 1"
        )


_AT_LEAST_ONE = (
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
)


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V2/V3 or Kimi language model; names as in the published config.json.

    q_lora_rank 0: queries come from one projection. scoring_func "softmax" goes with topk_method "greedy" or
    "group_limited_greedy", "sigmoid" with "noaux_tc" (a correction bias that only selects).
    """

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

    def __post_init__(self) -> None:
        for key in _AT_LEAST_ONE:
            _want(getattr(self, key) >= 1, key, getattr(self, key), "at least 1")
        _want(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", self.qk_rope_head_dim, "even")
        _want(self.q_lora_rank >= 0, "q_lora_rank", self.q_lora_rank, "0 (none) or a rank")
        layers = self.num_hidden_layers
        _want(
            0 <= self.first_k_dense_replace <= layers,
            "first_k_dense_replace",
            self.first_k_dense_replace,
            f"0..{layers}",
        )
        _want(self.n_shared_experts >= 0, "n_shared_experts", self.n_shared_experts, "0 or a count")
        _want(self.rms_norm_eps > 0, "rms_norm_eps", self.rms_norm_eps, "above 0")
        _want(
            all(0 <= t < self.vocab_size for t in self.eos_token_ids), "eos_token_ids", self.eos_token_ids, "in [0, V)"
        )
        if self.first_k_dense_replace < layers:
            self._check_router()

    def _check_router(self) -> None:
        methods = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}
        _want(self.scoring_func in methods, "scoring_func", self.scoring_func, f"one of {sorted(methods)}")
        legal = methods[self.scoring_func]
        _want(self.topk_method in legal, "topk_method", self.topk_method, f"{legal} with {self.scoring_func} scoring")
        experts, groups = self.n_routed_experts, self.n_group
        _want(self.moe_intermediate_size >= 1, "moe_intermediate_size", self.moe_intermediate_size, "at least 1")
        _want(
            groups >= 1 and experts >= 1 and experts % groups == 0, "n_group", groups, f"a divisor of {experts} experts"
        )
        _want(1 <= self.topk_group <= groups, "topk_group", self.topk_group, f"1..{groups}")
        most = experts // groups * self.topk_group
        _want(1 <= self.num_experts_per_tok <= most, "num_experts_per_tok", self.num_experts_per_tok, f"1..{most}")
        if self.topk_method == "noaux_tc" and groups > 1:
            _want(experts // groups >= 2, "n_group", groups, "such that a group has at least 2 experts")

    @property
    def kv_row(self) -> int:
        """Width of one KV row: the latent, then the rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def is_moe(self) -> tuple[bool, ...]:
        """Per layer, whether its MLP is a mixture of experts."""
        return tuple(i >= self.first_k_dense_replace for i in range(self.num_hidden_layers))

    def legal_tp(self) -> list[int]:
        """Tensor-parallel sizes that split heads and every MLP width evenly (the vocabulary is padded)."""
        widths = [self.num_attention_heads]
        if self.first_k_dense_replace > 0:
            widths.append(self.intermediate_size)
        if self.first_k_dense_replace < self.num_hidden_layers:
            widths.append(self.moe_intermediate_size)
        most = min(*widths, 1024)  # no engine has more ranks, and a file's width may be any number
        return [n for n in range(1, most + 1) if all(width % n == 0 for width in widths)]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], source: str) -> ModelConfig:
        """From the `model.*` keys of a KDTR file; `source` names the file in errors."""
        flat = {key[len("model.") :]: value for key, value in metadata.items() if key.startswith("model.")}
        yarn = {k[len("rope_scaling.") :]: flat.pop(k) for k in list(flat) if k.startswith("rope_scaling.")}
        if yarn:
            flat["rope_scaling"] = yarn
        return build(cls, flat, source)


def build(cls: type[C], values: Mapping[str, Any], source: str) -> C:
    """Make a frozen config of plain values: types converted by msgspec, unknown keys refused by name.

    Raises ConfigError naming `source` and the key.
    """
    _refuse_unknown(cls, values, source)
    try:
        return msgspec.convert(dict(values), cls, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from None


def _refuse_unknown(cls: Any, values: Mapping[str, Any], source: str) -> None:
    # msgspec ignores unknown keys of a dataclass, nested ones too.
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"{source}: unknown key {key!r}; known are {', '.join(sorted(hints))}")
        for kind in (hints[key], *typing.get_args(hints[key])):
            if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
                _refuse_unknown(kind, value, f"{source}: {key}")


@dataclass(frozen=True)
class DrafterConfig:
    """Which drafter, and its settings.

    name: "none", "oracle" (knows the golden continuation of a KDTR model) or "ngram" (looks up the text so far).
    block: tokens a round can commit, so the draft has block - 1 positions. topk: candidates per depth.
    shape: "tree", or "chain" for the single most likely path. hit[d]: the oracle's chance to know depth d + 1 (the
    last value holds for deeper ones); rank: the truth is put at a random rank below this; ngram_max: longest match.
    """

    name: str = "none"
    block: int = 8
    budget: int = 16
    topk: int = 16
    shape: str = "tree"
    hit: tuple[float, ...] = (1.0,)
    rank: int = 1
    seed: int = 0
    ngram_max: int = 4

    def __post_init__(self) -> None:
        _want(self.name in DRAFTERS, "drafter", self.name, f"one of {', '.join(DRAFTERS)}")
        _want(1 <= self.block <= 65, "block", self.block, "1..65")
        _want(0 <= self.budget <= 1024, "budget", self.budget, "0..1024")
        _want(1 <= self.topk <= 64, "topk", self.topk, "1..64")
        _want(self.shape in ("tree", "chain"), "shape", self.shape, "tree or chain")
        _want(bool(self.hit) and all(0.0 <= p <= 1.0 for p in self.hit), "hit", self.hit, "probabilities 0..1")
        _want(1 <= self.rank <= self.topk, "rank", self.rank, f"1..topk ({self.topk})")
        _want(1 <= self.ngram_max <= 16, "ngram_max", self.ngram_max, "1..16")


DRAFTERS = ("none", "oracle", "ngram")
DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class EngineConfig:
    """How one engine runs: model file, ranks, sizes, deadlines.

    threads: CPU threads per rank; 0 takes one for a small model, else shares the cores among the ranks.
    kv_tokens: rows of KV cache per rank, rounded up to whole pages; 0 takes 8 sequences of the model's longest
    context, at most 65536. max_batch: sequences per forward. prefill_chunk: prompt tokens per sequence and forward.
    max_queue: requests waiting before new ones are refused. Times in seconds: step_timeout is the least deadline of
    a forward (10 x its moving average if that is longer), load_timeout bounds loading, stall_timeout a load without
    progress, ping_interval is the pause after which an idle engine asks every rank for a sign of life.
    """

    model: str
    tp: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    kv_tokens: int = 0
    max_batch: int = 8
    prefill_chunk: int = 256
    max_queue: int = 256
    step_timeout: float = 10.0
    load_timeout: float = 600.0
    stall_timeout: float = 60.0
    ping_interval: float = 5.0

    def __post_init__(self) -> None:
        _want(bool(self.model), "model", self.model, "a path")
        _want(1 <= self.tp <= 1024, "tp", self.tp, "1..1024")
        _want(self.device in DEVICES, "device", self.device, f"one of {', '.join(DEVICES)}")
        _want(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        _want(0 <= self.threads <= 1024, "threads", self.threads, "0 (automatic) or a count")
        _want(0 <= self.kv_tokens <= 1 << 30, "kv_tokens", self.kv_tokens, "0 (automatic) or a count of rows")
        _want(1 <= self.max_batch <= 1024, "max_batch", self.max_batch, "1..1024")
        _want(1 <= self.prefill_chunk <= 1 << 16, "prefill_chunk", self.prefill_chunk, "1..65536")
        _want(0 <= self.max_queue <= 1 << 20, "max_queue", self.max_queue, "0..1048576")
        for key in ("step_timeout", "load_timeout", "stall_timeout", "ping_interval"):
            _want(0.0 < getattr(self, key) <= 86400.0, key, getattr(self, key), "seconds, above 0, at most 86400")

    def pages(self, model: ModelConfig) -> int:
        """KV pages per rank."""
        rows = self.kv_tokens or min(8 * (model.max_position_embeddings + self.drafter.budget + 1), 65536)
        return -(-rows // PAGE_ROWS)

    def mapping(self) -> dict[str, Any]:
        """Plain values, as `build` takes them."""
        return dataclasses.asdict(self)


def digest(config: Any) -> str:
    """sha256 of a config's values; equal on two processes exactly if their configs are."""
    return hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode()).hexdigest()
