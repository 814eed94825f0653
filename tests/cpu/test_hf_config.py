"""config.json of the published models, in every spelling; what the engine cannot do is refused by name."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from kdtp.config import ConfigError
from kdtp.model import rope
from kdtp.model.weights.hf_config import Fp8, Int4, parse, read
from tests.hf_cases import FP8, INT4, VARIANTS, config_json

# As published; what all of them share is in CONSTANT.
CONSTANT: dict[str, Any] = {
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "hidden_act": "silu",
    "ep_size": 1,
    "moe_layer_freq": 1,
    "pretraining_tp": 1,
    "seq_aux": True,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
}


def yarn(factor: float, mscale: float, beta_fast: float) -> dict[str, Any]:
    betas = {"beta_fast": beta_fast, "beta_slow": 1, "mscale": mscale, "mscale_all_dim": mscale}
    return {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096, **betas}


V2_LITE = CONSTANT | {
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "scoring_func": "softmax",
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": yarn(40, 0.707, 32),
    "max_position_embeddings": 163840,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
}
V3 = CONSTANT | {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 3,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": yarn(40, 1.0, 32),
    "max_position_embeddings": 163840,
    "num_nextn_predict_layers": 1,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "quantization_config": FP8 | {"scale_fmt": "ue8m0"},
}
MOONLIGHT = {key: value for key, value in V3.items() if key not in ("rope_scaling", "quantization_config")} | {
    "vocab_size": 163840,
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "first_k_dense_replace": 1,
    "intermediate_size": 11264,
    "moe_intermediate_size": 1408,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "max_position_embeddings": 8192,
    "num_nextn_predict_layers": 0,
    "eos_token_id": 163586,
}
K2 = V3 | {
    "model_type": "kimi_k2",
    "vocab_size": 163840,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "n_routed_experts": 384,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.827,
    "rope_theta": 50000.0,
    "rope_scaling": yarn(32, 1.0, 1),
    "max_position_embeddings": 131072,
    "num_nextn_predict_layers": 0,
    "eos_token_id": 163585,
}
THINKING = K2 | {"rms_norm_eps": 1e-5, "rope_scaling": yarn(64, 1.0, 1), "quantization_config": INT4}
K25 = {
    "model_type": "kimi_k25",
    "architectures": ["KimiK25ForConditionalGeneration"],
    "text_config": THINKING | {"rope_scaling": yarn(64, 1.0, 32), "id2label": {"0": "LABEL_0"}, "top_k": 50},
    "vision_config": {"vt_hidden_size": 1152},
    "media_placeholder_token_id": 163605,
}


@pytest.mark.parametrize(
    ("config", "scale", "row", "legal_tp"),
    [
        (V2_LITE, 1.5896, 576, [1, 2, 4, 8, 16]),
        (V3, 1.8739, 576, [1, 2, 4, 8, 16, 32, 64, 128]),
        (MOONLIGHT, 1.0, 576, [1, 2, 4, 8, 16]),
        (K2, 1.8133, 576, [1, 2, 4, 8, 16, 32, 64]),
        (THINKING, 2.0047, 576, [1, 2, 4, 8, 16, 32, 64]),
        (K25, 2.0047, 576, [1, 2, 4, 8, 16, 32, 64]),
    ],
    ids=["v2_lite", "v3", "moonlight", "k2", "k2_thinking", "k25"],
)
def test_published_models(config, scale, row, legal_tp):
    found = parse(config, "config.json").model
    assert rope.softmax_scale(found) * 192**0.5 == pytest.approx(scale, abs=1e-4)
    assert found.kv_row == row and found.legal_tp() == legal_tp
    text = config.get("text_config", config)
    for key in ("rope_theta", "rms_norm_eps", "n_group", "routed_scaling_factor", "norm_topk_prob", "scoring_func"):
        assert getattr(found, key) == text[key], key
    assert found.q_lora_rank == (text["q_lora_rank"] or 0) and found.eos_token_ids == (text["eos_token_id"],)
    scaling = text.get("rope_scaling")
    assert (found.rope_scaling is None) == (scaling is None)
    for key in () if scaling is None else scaling.keys() - {"type"}:
        assert getattr(found.rope_scaling, key) == scaling[key], key


def test_what_is_beside_the_model():
    v3, k25, lite = (parse(config, "c") for config in (V3, K25, V2_LITE))
    assert (v3.family, v3.wrapped, v3.mtp_layers, v3.quantization) == ("deepseek_v3", False, 1, Fp8(128, 128))
    assert (k25.family, k25.wrapped, k25.mtp_layers, k25.quantization) == ("kimi_k25", True, 0, Int4())
    assert (lite.family, lite.quantization, lite.tied) == ("deepseek_v2", None, False)
    on_top = {**K25, "text_config": {**K25["text_config"], "quantization_config": None}, "quantization_config": INT4}
    assert parse(on_top, "c") == k25


def respelled(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """As transformers 5 saves it."""
    saved = copy.deepcopy(config)
    rope_type = "yarn" if saved.get("rope_scaling") else "default"
    scaling = saved.pop("rope_scaling", None) or {}
    scaling.pop("type", None)
    for key in ("scoring_func", "topk_method") if saved["model_type"] != "deepseek_v2" else ("scoring_func",):
        saved.pop(key)
    saved["rope_parameters"] = {"rope_theta": saved.pop("rope_theta"), "rope_type": rope_type, **scaling, **changes}
    return saved


@pytest.mark.parametrize("config", [V2_LITE, V3, MOONLIGHT, K2])
def test_the_spelling_of_transformers_5(config):
    assert parse(respelled(config), "c") == parse(config, "c")
    if "rope_scaling" in config:
        assert parse(respelled(config, rope_type="deepseek_yarn"), "c") == parse(config, "c")


def test_stop_tokens_come_from_both_files(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(K25))
    assert read(tmp_path).model.eos_token_ids == (163585,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [163586, 163585]}')
    assert read(tmp_path).model.eos_token_ids == (163585, 163586)


def test_a_dense_model_and_one_without_shared_experts():
    dense = parse(V2_LITE | {"n_routed_experts": None}, "c").model
    assert not any(dense.is_moe) and dense.n_routed_experts == 0
    assert parse(V2_LITE | {"n_shared_experts": None}, "c").model.n_shared_experts == 0


def inside(**changes: Any) -> dict[str, Any]:
    """INT4 with other weights."""
    config = copy.deepcopy(INT4)
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "deepseek_v32"}, 'model_type = "deepseek_v32": must be one of deepseek_v2, deepseek_v3, kimi_k2'),
    ({"model_type": None}, "model_type = null: must be one of"),
    ({"hidden_act": "gelu"}, 'hidden_act = "gelu": must be "silu"'),
    ({"attention_bias": True}, "attention_bias = true: must be false"),
    ({"mlp_bias": True}, "mlp_bias = true: must be false"),
    ({"moe_layer_freq": 2}, "moe_layer_freq = 2: must be 1"),
    ({"rope_interleave": False}, "rope_interleave = false: must be true"),
    ({"sliding_window": 512}, "sliding_window = 512: must be null"),
    ({"topk_method": "aux_loss"}, "topk_method = 'aux_loss': must be ('noaux_tc',) with sigmoid scoring"),
    ({"scoring_func": "sqrtsoftplus"}, "scoring_func = 'sqrtsoftplus': must be one of ['sigmoid', 'softmax']"),
    ({"num_key_value_heads": 8}, "num_key_value_heads = 8: must be num_attention_heads, 128"),
    ({"num_nextn_predict_layers": "1"}, 'num_nextn_predict_layers = "1": must be 0..64'),
    ({"hidden_size": None}, "hidden_size: is missing"),
    ({"rms_norm_eps": None}, "rms_norm_eps: is missing"),
    ({"norm_topk_prob": None}, "norm_topk_prob: is missing"),
    ({"routed_scaling_factor": None}, "routed_scaling_factor: is missing"),
    ({"rope_theta": None}, "rope_theta: is missing"),
    ({"hidden_size": "many"}, "hidden_size: "),
    ({"kv_lora_rank": 0}, "kv_lora_rank = 0: must be 1..65536"),
    ({"eos_token_id": "1"}, 'eos_token_id = "1": must be a token id or a list of them'),
    ({"eos_token_id": 129280}, "eos_token_ids = (129280,): must be at most 1024 ids in [0, 129280)"),
    ({"rope_scaling": yarn(40, 1.0, 32) | {"type": "linear"}}, 'rope_scaling.type = "linear": must be yarn'),
    ({"rope_scaling": yarn(40, 1.0, 32) | {"type": None}}, "rope_scaling.type = null: must be yarn"),
    ({"rope_scaling": yarn(40, 1.0, 32) | {"attention_factor": 2}}, "rope_scaling.attention_factor = 2: must be"),
    ({"rope_scaling": yarn(40, 1.0, 32) | {"truncate": False}}, "rope_scaling.truncate = false: must be"),
    ({"rope_scaling": yarn(40, 1.0, 32) | {"short_factor": []}}, "rope_scaling.short_factor = []: must be absent"),
    ({"rope_scaling": {"type": "yarn", "factor": 4}}, "original_max_position_embeddings"),
    ({"rope_scaling": [1]}, "rope_scaling = [1]: must be an object"),
    ({"quantization_config": []}, "quantization_config = []: must be an object"),
    (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        'quantization_config.quant_method = "modelopt": must be fp8 or compressed-tensors',
    ),
    ({"quantization_config": {"quant_method": "gptq"}}, 'quant_method = "gptq": must be'),
    ({"quantization_config": FP8 | {"fmt": "e5m2"}}, 'quantization_config.fmt = "e5m2": must be "e4m3"'),
    ({"quantization_config": FP8 | {"activation_scheme": "static"}}, 'activation_scheme = "static": must be "dynamic"'),
    ({"quantization_config": FP8 | {"weight_block_size": None}}, "weight_block_size = null: must be the rows and"),
    ({"quantization_config": FP8 | {"weight_block_size": [128, 0]}}, "weight_block_size = [128, 0]: must be"),
    ({"quantization_config": INT4 | {"format": "marlin-24"}}, 'format = "marlin-24": must be "pack-quantized"'),
    ({"quantization_config": INT4 | {"config_groups": {}}}, "config_groups = {}: must be one group or more"),
    ({"quantization_config": inside(num_bits=8)}, "config_groups.group_0.weights.num_bits = 8: must be 4"),
    ({"quantization_config": inside(group_size=64)}, "weights.group_size = 64: must be 32"),
    ({"quantization_config": inside(symmetric=False)}, "weights.symmetric = false: must be true"),
    ({"quantization_config": inside(strategy="channel")}, 'weights.strategy = "channel": must be "group"'),
    ({"quantization_config": inside(type="float")}, 'weights.type = "float": must be "int"'),
    ({"quantization_config": inside(actorder="group")}, 'weights.actorder = "group": must be null'),
]


@pytest.mark.parametrize(("changes", "complaint"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_refused_by_name(changes, complaint):
    with pytest.raises(ConfigError, match="^config.json: .*" + re.escape(complaint)):
        parse(V3 | changes, "config.json")


def test_refused_in_a_wrapper():
    with pytest.raises(ConfigError, match=re.escape("c: text_config = null: must be an object, in a kimi_k25 model")):
        parse({"model_type": "kimi_k25"}, "c")
    with pytest.raises(ConfigError, match="hidden_act"):
        parse(K25 | {"text_config": K25["text_config"] | {"hidden_act": "relu"}}, "c")


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "no such file or directory"), ("[1]", "must be a JSON object, found list"), ("{", "must be JSON: ")],
)
def test_files_that_are_none(content, complaint, tmp_path: Path):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path / 'config.json'}: ") + ".*" + complaint):
        read(tmp_path)


def test_a_file_that_is_too_large(tmp_path: Path):
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(2**26 + 1)
    with pytest.raises(ConfigError, match=r"config.json: 67108865 bytes: must be at most 67108864"):
        read(tmp_path)


@pytest.mark.parametrize("name", [name for name in V3["rope_scaling"] if name != "type"])
def test_nothing_of_yarn_is_assumed(name):
    rope_scaling = {key: value for key, value in V3["rope_scaling"].items() if key != name}
    with pytest.raises(ConfigError, match=rf"config.json: rope_scaling.{name}: is missing"):
        parse(V3 | {"rope_scaling": rope_scaling}, "config.json")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_pipe_is_not_waited_for_and_a_device_not_read(name, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(V3))
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(ConfigError, match=f"{name}: want a regular file, found a device or pipe"):
        read(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(ConfigError, match=f"{name}: want a regular file, found a device or pipe"):
        read(tmp_path)
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(name)
    with pytest.raises(ConfigError, match=f"{name}: too many levels of symbolic links"):
        read(tmp_path)


def test_the_cases_of_other_tests_are_legal():
    for variant in VARIANTS.values():
        assert parse(config_json(variant), "c").model.vocab_size == 67
