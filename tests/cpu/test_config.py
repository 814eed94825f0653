"""Configuration: every field refuses what lies just outside its legal values, by name; files and flags alike."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from kdtp.config import ConfigError, DrafterConfig, EngineConfig, ModelConfig, YarnConfig, build
from kdtp.model.weights.table import parameters
from kdtp.types import SamplingParams
from tests.fake_target import model

MOE: dict[str, Any] = {
    **dataclasses.asdict(model()),
    "first_k_dense_replace": 0,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 1,
}
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 64, "beta_slow": 0.001}
DAY = 86400.0
# By class: the values that are legal together, and by field the least and the largest legal value.
LEGAL: dict[type, tuple[dict[str, Any], dict[str, tuple[float, float]]]] = {
    ModelConfig: (
        MOE,
        {
            "vocab_size": (1, 2**24),
            "hidden_size": (1, 2**20),
            "num_hidden_layers": (1, 1024),
            "first_k_dense_replace": (0, 2),
            "num_attention_heads": (1, 4096),
            "q_lora_rank": (0, 2**16),
            "kv_lora_rank": (1, 2**16),
            "qk_nope_head_dim": (1, 4096),
            "qk_rope_head_dim": (2, 4096),
            "v_head_dim": (1, 4096),
            "intermediate_size": (1, 2**20),
            "moe_intermediate_size": (1, 2**20),
            "n_routed_experts": (1, 2**16),
            "num_experts_per_tok": (1, 8),
            "n_shared_experts": (0, 1024),
            "max_position_embeddings": (1, 2**24),
            "n_group": (1, 8),
            "topk_group": (1, 1),
            "routed_scaling_factor": (0.001, 1000.0),
            "rms_norm_eps": (1e-12, 1.0),
            "rope_theta": (2.0, 1e12),
        },
    ),
    YarnConfig: (
        YARN,
        {
            "factor": (1.0, 1e6),
            "original_max_position_embeddings": (1, 2**24),
            "beta_fast": (0.001, 1e6),
            "beta_slow": (0.001, 32.0),
            "mscale": (0.0, 100.0),
            "mscale_all_dim": (0.0, 100.0),
        },
    ),
    DrafterConfig: (
        {},
        {
            "block": (1, 65),
            "budget": (0, 1024),
            "topk": (1, 64),
            "rank": (1, 16),
            "seed": (-(2**63), 2**63 - 1),
            "ngram_max": (1, 16),
            "window": (0, 1 << 24),
            "amplitude": (0.0, 100.0),
        },
    ),
    EngineConfig: (
        {"model": "m"},
        {
            "tp": (1, 1024),
            "threads": (0, 8),
            "kv_tokens": (0, 2**30),
            "max_batch": (1, 1024),
            "prefill_chunk": (1, 2**16),
            "max_queue": (1, 2**20),
            "max_queue_tokens": (1, 2**40),
            "step_timeout": (0.001, DAY),
            "load_timeout": (0.001, DAY),
            "stall_timeout": (0.001, DAY),
            "ping_interval": (0.001, DAY),
        },
    ),
    SamplingParams: (
        {},
        {
            "max_tokens": (1, 2**24),
            "temperature": (0.0, 2.0),
            "top_p": (5e-324, 1.0),
            "top_k": (0, 2**31 - 1),
            "min_p": (0.0, math.nextafter(1.0, 0.0)),
            "seed": (-(2**63), 2**63 - 1),
            "min_tokens": (0, 128),
            "repetition_penalty": (0.01, 100.0),
            "presence_penalty": (-2.0, 2.0),
            "frequency_penalty": (-2.0, 2.0),
            "logprobs": (0, 20),
            "prompt_logprobs": (0, 20),
        },
    ),
}
FIELDS = [(cls, key) for cls, (_, ranges) in LEGAL.items() for key in ranges]


def made(cls: type, **changes: Any) -> Any:
    return cls(**{**LEGAL[cls][0], **changes})


def refused(cls: type, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^(rope_scaling\.|drafter\.)?{key} = .*: must be ") as caught:
        made(cls, **{key: value})
    assert str(value)[:6] in str(caught.value)


@pytest.mark.parametrize("cls", LEGAL)
def test_the_table_has_every_number(cls: type) -> None:
    numbers = {f.name for f in dataclasses.fields(cls)} if dataclasses.is_dataclass(cls) else set(cls.__annotations__)
    others = {
        "scoring_func", "topk_method", "norm_topk_prob", "rope_scaling", "eos_token_ids", "name", "shape", "hit",
        "model", "device", "dtype", "drafter", "graphs", "busy_wait", "prefix_cache", "stop_tokens", "ignore_eos",
        "allowed_tokens", "banned_tokens", "logit_bias", "grammar", "width", "placement", "trees", "tokenizer",
    }  # fmt: skip
    assert numbers - others == set(LEGAL[cls][1])


@pytest.mark.parametrize(("cls", "key"), FIELDS, ids=lambda x: getattr(x, "__name__", x))
def test_numbers_end_where_they_should(cls: type, key: str) -> None:
    least, most = LEGAL[cls][1][key]
    for value in (least, most):
        assert getattr(made(cls, **{key: value}), key) == value
    outside: list[Any] = [least - 1, most + 1]
    if isinstance(least, float):
        outside = [math.nextafter(least, -math.inf), math.nextafter(most, math.inf), math.nan, math.inf, -math.inf]
    for value in outside:
        refused(cls, key, value)


@pytest.mark.parametrize(
    ("cls", "key", "values"),
    [
        (ModelConfig, "qk_rope_head_dim", [3]),
        (ModelConfig, "eos_token_ids", [(-1,), (0, 2**24), (0,) * 1025]),
        (ModelConfig, "scoring_func", ["tanh", ""]),
        (ModelConfig, "topk_method", ["noaux_tc", "best"]),
        (ModelConfig, "n_group", [3, 5]),
        (YarnConfig, "beta_slow", [32.5]),
        (DrafterConfig, "drafter", ["magic", ""]),
        (DrafterConfig, "shape", ["bush"]),
        (DrafterConfig, "hit", [(), (-0.1,), (0.5, 1.1), (math.nan,), (0.5,) * 65]),
        (EngineConfig, "model", ["", "a\0b"]),
        (EngineConfig, "device", ["tpu"]),
        (EngineConfig, "dtype", ["float16", "x" * 1000]),
        (SamplingParams, "temperature", [-0.0001, 9e-6]),
        (SamplingParams, "stop_tokens", [(1,) * 1025]),
    ],
)
def test_other_values(cls: type, key: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=rf"^(drafter\.|rope_scaling\.)?{key} = .*: must be ") as caught:
            made(cls, **{"name" if key == "drafter" else key: value})
        assert len(str(caught.value)) < 8000


def test_the_largest_legal_model_is_handled_at_once() -> None:
    ranges = LEGAL[ModelConfig][1]
    largest = {key: most for key, (_, most) in ranges.items()} | {"n_group": 1}
    config = made(ModelConfig, **largest | {"rope_scaling": made(YarnConfig)})
    assert config.legal_tp() == [2**i for i in range(11)]
    assert len(parameters(config)) > 10_000


def test_every_rank_has_token_ids() -> None:
    """Four ranks have 3 of 9 ids each, so the last would have none: its head multiplied nothing, which failed."""
    config = dataclasses.replace(model(), num_attention_heads=4, intermediate_size=8, moe_intermediate_size=8)
    legal = {vocab: dataclasses.replace(config, vocab_size=vocab).legal_tp() for vocab in (9, 10, 3, 1)}
    assert legal == {9: [1, 2], 10: [1, 2, 4], 3: [1, 2], 1: [1]}


def test_a_file_s_layers_are_refused_before_they_are_counted() -> None:
    metadata = {f"model.{key}": value for key, value in MOE.items() if key != "rope_scaling"}
    with pytest.raises(ConfigError, match=r"^f\.kdtr: num_hidden_layers = 1099511627776: must be 1\.\.1024$"):
        ModelConfig.from_metadata(metadata | {"model.num_hidden_layers": 2**40}, "f.kdtr")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"drafter": {"rank": 99}}, r"--oracle-rank: drafter.rank = 99: must be 1..topk (16)"),
        ({"drafter": {"topk": 99}}, r"s.toml: drafter.topk = 99: must be 1..64"),
        ({"tp": "two"}, "s.toml: tp: Expected `int`, got `str`"),
        ({"drafter": {"hit": [1, "x"]}}, "s.toml: drafter.hit[1]: Expected `float`, got `str`"),
        ({"step_timeout": 10**400}, "s.toml: step_timeout: Number out of range"),
        ({"drafter": {"blok": 1}}, "s.toml: drafter: unknown key 'blok'; known are "),
    ],
)
def test_errors_name_key_and_origin(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(EngineConfig, {"model": "m", **values}, "s.toml", {"drafter.rank": "--oracle-rank"})
    assert str(caught.value).startswith(text) and "$" not in str(caught.value)
