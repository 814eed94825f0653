"""Frozen configuration: what a model is, and how an engine runs it.

Keys of a file or message go straight into a constructor, so an unknown key fails by name; every value is checked
where it is made, with an error that names key, value and what is legal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from kdtp.types import MOST_THREADS, PAGE_ROWS, SHAPES
from kdtp.values import ConfigError, Range, build, check_ranges, digest, want, want_in

__all__ = [  # what comes from kdtp.values, and what is made here
    "BUSY_WAITS",
    "DEVICES",
    "DRAFTERS",
    "DTYPES",
    "PLACEMENTS",
    "TREES",
    "WIDTHS",
    "ConfigError",
    "DrafterConfig",
    "EngineConfig",
    "HeadDim",
    "ModelConfig",
    "Positions",
    "Range",
    "Width",
    "YarnConfig",
    "build",
    "check_ranges",
    "digest",
]

# Bounds of a model's sizes are well above any published one, and low enough that what is made for a config (the table
# of its parameters, say) stays small: these numbers come from a file.
Width = Annotated[int, Range(1, 1 << 20)]
HeadDim = Annotated[int, Range(1, 4096)]
MaybeCount = Annotated[int, Range(0, 1 << 16)]  # 0 where a dense model has none
Positions = Annotated[int, Range(1, 1 << 24)]  # as many as a request's prompt may have on the wire
Seconds = Annotated[float, Range(0.001, 86400.0)]
_MOST_RANKS = _MOST_ENDS = 1024
_DEEPEST = 64  # draft positions


@dataclass(frozen=True)
class YarnConfig:
    """YaRN context extension (config.json `rope_scaling`): all lengths in tokens."""

    factor: Annotated[float, Range(1.0, 1e6)]
    original_max_position_embeddings: Positions
    beta_fast: Annotated[float, Range(0.001, 1e6)] = 32.0
    beta_slow: Annotated[float, Range(0.001, 1e6)] = 1.0
    mscale: Annotated[float, Range(0.0, 100.0)] = 1.0
    mscale_all_dim: Annotated[float, Range(0.0, 100.0)] = 0.0

    def __post_init__(self) -> None:
        check_ranges(self, "rope_scaling.")
        want(self.beta_slow <= self.beta_fast, "rope_scaling.beta_slow", self.beta_slow, f"at most {self.beta_fast}")


@dataclass(frozen=True)
class ModelConfig:
    """A DeepSeek-V2/V3 or Kimi language model; names as in the published config.json.

    q_lora_rank 0: queries come from one projection. scoring_func "softmax" goes with topk_method "greedy" or
    "group_limited_greedy", "sigmoid" with "noaux_tc" (a correction bias that only selects).
    """

    vocab_size: Annotated[int, Range(1, 1 << 24)]
    hidden_size: Width
    num_hidden_layers: Annotated[int, Range(1, 1024)]
    first_k_dense_replace: int
    num_attention_heads: Annotated[int, Range(1, 4096)]
    q_lora_rank: MaybeCount
    kv_lora_rank: Annotated[int, Range(1, 1 << 16)]
    qk_nope_head_dim: HeadDim
    qk_rope_head_dim: HeadDim
    v_head_dim: HeadDim
    intermediate_size: Width
    moe_intermediate_size: Annotated[int, Range(0, 1 << 20)]
    n_routed_experts: MaybeCount
    num_experts_per_tok: MaybeCount
    n_shared_experts: Annotated[int, Range(0, 1024)]
    max_position_embeddings: Positions
    scoring_func: str = "softmax"
    topk_method: str = "greedy"
    n_group: MaybeCount = 1
    topk_group: MaybeCount = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: Annotated[float, Range(0.001, 1000.0)] = 1.0
    rms_norm_eps: Annotated[float, Range(1e-12, 1.0)] = 1e-6
    rope_theta: Annotated[float, Range(2.0, 1e12)] = 10000.0
    rope_scaling: YarnConfig | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_ranges(self)
        layers = self.num_hidden_layers
        want_in(0, layers, "first_k_dense_replace", self.first_k_dense_replace)
        want(self.qk_rope_head_dim % 2 == 0, "qk_rope_head_dim", self.qk_rope_head_dim, "even")
        ends = self.eos_token_ids
        legal = len(ends) <= _MOST_ENDS and all(0 <= t < self.vocab_size for t in ends)
        want(legal, "eos_token_ids", ends, f"at most {_MOST_ENDS} ids in [0, {self.vocab_size})")
        if self.first_k_dense_replace < layers:
            self._check_router()

    def _check_router(self) -> None:
        methods = {"softmax": ("greedy", "group_limited_greedy"), "sigmoid": ("noaux_tc",)}
        want(self.scoring_func in methods, "scoring_func", self.scoring_func, f"one of {sorted(methods)}")
        legal = methods[self.scoring_func]
        want(self.topk_method in legal, "topk_method", self.topk_method, f"{legal} with {self.scoring_func} scoring")
        experts, groups = self.n_routed_experts, self.n_group
        for key in ("moe_intermediate_size", "n_routed_experts"):
            want(getattr(self, key) >= 1, key, getattr(self, key), "at least 1 in a model with experts")
        want(groups >= 1 and experts % groups == 0, "n_group", groups, f"a divisor of {experts} experts")
        want_in(1, groups, "topk_group", self.topk_group)
        want_in(1, experts // groups * self.topk_group, "num_experts_per_tok", self.num_experts_per_tok)
        if self.topk_method == "noaux_tc" and groups > 1:
            want(experts // groups >= 2, "n_group", groups, "such that a group has at least 2 experts")

    @property
    def kv_row(self) -> int:
        """Width of one KV row: the latent, then the rope part."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def is_moe(self) -> tuple[bool, ...]:
        """Per layer, whether its MLP is a mixture of experts."""
        return tuple(i >= self.first_k_dense_replace for i in range(self.num_hidden_layers))

    def legal_tp(self) -> list[int]:
        """Tensor-parallel sizes that split heads and every MLP width evenly, and leave no rank without token ids (the
        vocabulary is padded)."""
        widths = [self.num_attention_heads]
        if self.first_k_dense_replace > 0:
            widths.append(self.intermediate_size)
        if self.first_k_dense_replace < self.num_hidden_layers:
            widths.append(self.moe_intermediate_size)
        most = min(*widths, _MOST_RANKS)
        even = [n for n in range(1, most + 1) if all(width % n == 0 for width in widths)]
        return [n for n in even if (n - 1) * -(-self.vocab_size // n) < self.vocab_size]

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], source: str) -> ModelConfig:
        """From the `model.*` keys of a KDTR file; `source` names the file in errors."""
        flat = {key[len("model.") :]: value for key, value in metadata.items() if key.startswith("model.")}
        yarn = {k[len("rope_scaling.") :]: flat.pop(k) for k in list(flat) if k.startswith("rope_scaling.")}
        if yarn:
            flat["rope_scaling"] = yarn
        return build(cls, flat, source)


@dataclass(frozen=True)
class DrafterConfig:
    """Which drafter, and its settings.

    name: "none", "oracle" (knows the golden continuation of a KDTR model), "ngram" (looks up the text so far), "dflash"
    (a network in the folder `model`) or "dflash+ngram", both in one tree. block: tokens a round can commit, so the
    draft has block - 1 positions. topk: candidates per depth. shape: "tree", "chain" for the single most likely path,
    or "seeded" for that path, whole, and then the best others. width: "budget" nodes in every round, or "auto", at most
    so many: those that bring the most expected tokens per second by measured time, none if none do. hit[d]: the
    oracle's chance to know depth d + 1 (the last value holds for deeper ones); rank: the truth is put at a random rank
    below this; ngram_max: longest match. placement: of the network, "workers" (split over the ranks, beside the
    target) or "coordinator" (whole in its process). trees: a network's alone are grown on the "device" that drafts, all
    at once, or one by one on the "host", as all others are; "auto" is the device if that is a GPU. 0 leaves to the
    network's file its window (tokens back) and amplitude (of its cosines).
    """

    name: str = "none"
    block: Annotated[int, Range(1, _DEEPEST + 1)] = 8
    budget: Annotated[int, Range(0, 1024)] = 16
    topk: Annotated[int, Range(1, 64)] = 16
    shape: str = "tree"
    width: str = "budget"
    placement: str = "auto"
    trees: str = "auto"
    hit: tuple[float, ...] = (1.0,)
    rank: int = 1
    seed: Annotated[int, Range(-(1 << 63), (1 << 63) - 1)] = 0
    ngram_max: Annotated[int, Range(1, 16)] = 4
    model: str = ""
    window: Annotated[int, Range(0, 1 << 24)] = 0
    amplitude: Annotated[float, Range(0.0, 100.0)] = 0.0

    @property
    def network(self) -> bool:
        """Whether there is a network that drafts."""
        return bool(self.model)

    def grown(self, on_gpu: bool) -> str:
        """The shape of the trees that are grown where a network drafts; "" if the coordinator grows them."""
        there = self.trees == "device" or (self.trees == "auto" and on_gpu)
        return self.shape if self.name == "dflash" and there else ""

    def __post_init__(self) -> None:
        want(self.name in DRAFTERS, "drafter", self.name, f"one of {', '.join(DRAFTERS)}")
        check_ranges(self, "drafter.")
        network = "dflash" in self.name
        want(bool(self.model) == network, "drafter.model", self.model, "a folder with dflash, else absent")
        for key, among in (("shape", SHAPES), ("width", WIDTHS), ("placement", PLACEMENTS), ("trees", TREES)):
            want(getattr(self, key) in among, f"drafter.{key}", getattr(self, key), f"one of {', '.join(among)}")
        legal = self.trees != "device" or self.name == "dflash"
        want(legal, "drafter.trees", self.trees, f"auto or host with {self.name}: only dflash drafts on a device alone")
        legal = 1 <= len(self.hit) <= _DEEPEST and all(0.0 <= p <= 1.0 for p in self.hit)
        want(legal, "drafter.hit", self.hit, f"1..{_DEEPEST} probabilities 0..1")
        want(1 <= self.rank <= self.topk, "drafter.rank", self.rank, f"1..topk ({self.topk})")


DRAFTERS = ("none", "oracle", "ngram", "dflash", "dflash+ngram")
WIDTHS = ("budget", "auto")
PLACEMENTS = ("auto", "workers", "coordinator")
TREES = ("auto", "device", "host")
DTYPES = ("float32", "bfloat16")
DEVICES = ("cpu", "cuda")
BUSY_WAITS = ("auto", "on", "off")


@dataclass(frozen=True)
class EngineConfig:
    """How one engine runs: model file, ranks, sizes, deadlines.

    threads: CPU threads per rank; 0 takes one for a small model, else shares the cores among the ranks.
    kv_tokens: rows of KV cache per rank, rounded up to whole pages; 0 takes 8 sequences of the model's longest
    context, at most 65536. max_batch: sequences per forward. prefill_chunk: rows of prompts per forward, of all
    sequences. graphs: on a GPU, forwards of few rows are replays of CUDA graphs, of the same bits; no effect on a CPU.
    busy_wait: processes that wait for each other's steps poll for some milliseconds before they sleep; "auto": on GPUs,
    if there are two cores for each process.
    prefix_cache: requests whose texts begin alike share the pages of what is alike; no text changes. max_queue,
    max_queue_tokens: requests and their tokens waiting before new ones are refused; at least 1, as each waits for the
    next step; one alone may be longer. tokenizer: folder of its files, for grammars; "": where the model is. Seconds:
    step_timeout, the least deadline of a forward (10 x its moving average if longer); load_timeout; stall_timeout of a
    load without progress; ping_interval between signs of life of an idle engine.
    """

    model: str
    tp: Annotated[int, Range(1, _MOST_RANKS)] = 1
    device: str = "cpu"
    dtype: str = "float32"
    threads: Annotated[int, Range(0, MOST_THREADS)] = 0
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    kv_tokens: Annotated[int, Range(0, 1 << 30)] = 0
    max_batch: Annotated[int, Range(1, 1024)] = 8
    prefill_chunk: Annotated[int, Range(1, 1 << 16)] = 256
    graphs: bool = True
    busy_wait: str = "auto"
    prefix_cache: bool = True
    max_queue: Annotated[int, Range(1, 1 << 20)] = 256
    max_queue_tokens: Annotated[int, Range(1, 1 << 40)] = 1 << 22
    tokenizer: str = ""
    step_timeout: Seconds = 10.0
    load_timeout: Seconds = 600.0
    stall_timeout: Seconds = 60.0
    ping_interval: Seconds = 5.0

    def __post_init__(self) -> None:
        want(bool(self.model) and "\0" not in self.model, "model", self.model, "a path")
        for key, legal in (("device", DEVICES), ("dtype", DTYPES), ("busy_wait", BUSY_WAITS)):
            want(getattr(self, key) in legal, key, getattr(self, key), f"one of {', '.join(legal)}")
        check_ranges(self)
        alone = self.busy_wait == "on" and self.tp == 1
        want(not alone, "busy_wait", self.busy_wait, "auto or off with one rank, which waits for nobody")

    def pages(self, model: ModelConfig) -> int:
        """KV pages per rank."""
        rows = self.kv_tokens or min(8 * (model.max_position_embeddings + self.drafter.budget + 1), 65536)
        return -(-rows // PAGE_ROWS)

    def mapping(self) -> dict[str, Any]:
        """Plain values, as `build` takes them."""
        return dataclasses.asdict(self)
