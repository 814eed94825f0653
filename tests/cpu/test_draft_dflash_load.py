"""draft.dflash: published folders that are not what they say, or say what is not known, are refused by name."""

import json

import numpy as np
import pytest
import torch

from kdtp.config import ConfigError
from kdtp.draft.dflash import config as configs
from kdtp.draft.dflash.weights import Weights
from kdtp.model.weights.hf_write import bf16
from kdtp.model.weights.safetensors import CheckpointError
from tests.dflash_cases import CASES, V1, V2, random_drafter, write_folder

CPU = torch.device("cpu")
NESTED = V1["dflash_config"]
KIMI = {  # the shape of the released drafters, as far as it is public
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "block_size": 8,
    "bos_token_id": 163584,
    "dflash_config": {"mask_token_id": 163838, "target_layer_ids": [1, 12, 24, 35, 47, 58]},
    "dtype": "bfloat16",
    "eos_token_id": 163585,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "layer_types": ["full_attention"] * 6,
    "max_position_embeddings": 262144,
    "max_window_layers": 6,
    "num_attention_heads": 64,
    "num_hidden_layers": 6,
    "num_key_value_heads": 8,
    "num_target_layers": 61,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 64.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
    },
    "rope_theta": 50000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 163840,
}


def test_a_released_configuration():
    config = configs.parse(KIMI, "config.json")
    assert (config.version, config.block_size, config.features) == (1, 8, 6 * 7168)
    assert config.windows == (0,) * 6 and config.causal == (False,) * 6
    assert config.rope_scaling is not None and config.rope_scaling.factor == 64.0 and config.rope_amplitude is None
    assert configs.parse(KIMI, "", amplitude=1.4159).rope_amplitude == 1.4159
    assert configs.parse(KIMI, "", window=4096).windows == (4096,) * 6
    assert [n for n in (1, 2, 3, 4, 8, 16) if n in config.legal_tp()] == [1, 2, 4, 8]


def test_nested_values_win():
    values = V1 | {"block_size": 16, "mask_token_id": 1, "dflash_config": NESTED | {"block_size": 4}}
    config = configs.parse(values, "")
    assert (config.block_size, config.mask_token_id) == (4, 7)
    flat = {k: v for k, v in V1.items() if k != "dflash_config"} | NESTED
    assert configs.parse(flat, "") == configs.parse(V1, "")


def nested(**changes):
    return {"dflash_config": NESTED | changes}


def v2(**changes):
    return V2 | {"dflash_config": V2["dflash_config"] | changes}


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tree_depth": 3}, "unknown key 'tree_depth'"),
        (nested(full_attention_causal=True), "unknown key 'full_attention_causal'"),
        (nested(markov_rank=64), "markov_rank = 64: must be absent: this is DSpark, not DFlash"),
        ({"projector_type": "mlp"}, "projector_type = mlp: must be absent"),
        (nested(attention_mode="mla"), "attention_mode = mla: must be absent: this is a drafter with latent attention"),
        ({"use_swa": True}, "use_swa = True: must be absent: this is MiMo"),
        ({"model_type": "llama"}, "model_type = llama: must be qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu: must be silu"),
        ({"use_sliding_window": True}, "use_sliding_window = True: must be False"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}: must be None"),
        ({"architectures": ["DFlash2DraftModel"]}, "architectures = ['DFlash2DraftModel']: must be [DFlashDraftModel]"),
        ({"block_size": None}, "block_size: is missing"),
        (nested(mask_token_id=None), "mask_token_id: is missing"),
        (nested(target_layer_ids=None), "target_layer_ids: is missing"),
        ({"rope_theta": None}, "rope_theta: is missing"),
        ({"block_size": 1}, "block_size = 1: must be 2..65"),
        ({"block_size": -1}, "block_size = -1: must be 2..65"),
        ({"block_size": True}, "block_size: Expected `int`, got `bool`"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers = 2: must be an integer in 1..256"),
        (nested(mask_token_id=-1), "mask_token_id = -1: must be 0..96"),
        ({"block_size": "many"}, "block_size: Expected `int`, got `str`"),
        (nested(mask_token_id=97), "mask_token_id = 97: must be 0..96"),
        (nested(target_layer_ids=[0, 4]), "target_layer_ids = (0, 4): must be 1..64 layers in 0..3"),
        (nested(target_layer_ids=[]), "target_layer_ids = (): must be 1..64 layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3: must be a divisor of 8 heads"),
        ({"head_dim": 9}, "head_dim = 9: must be even"),
        ({"layer_types": ["full_attention"]}, "layer_types = ['full_attention']: must be of num_hidden_layers, 2"),
        ({"layer_types": ["linear_attention"] * 2}, "must be a list of full_attention and sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window = None: must be at least 1"),
        ({"is_causal": 1}, "is_causal and causal = [1]: must be true or false, alike"),
        ({"is_causal": True, **nested(causal=False)}, "is_causal and causal = [True, False]: must be"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.rope_type = llama3: must be yarn"),
        ({"rope_scaling": {"rope_type": "yarn", "factors": 8.0}}, "rope_scaling.factors = 8.0: must be absent"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": 3}, "rope_scaling = 3: must be an object"),
        ({"dflash_config": 3}, "dflash_config = 3: must be an object"),
        (v2(selector_rank=0), "selector_rank = 0: must be at least 1, in a drafter with conv_kernel_size"),
        (v2(conv_group_size=5), "conv_group_size = 5: must be a divisor of hidden_size 24"),
        (v2(selector_top_k=98), "selector_top_k = 98: must be 0..64"),
    ],
)
def test_configurations_that_are_refused(changes, error):
    with pytest.raises(ConfigError) as found:
        configs.parse(V1 | changes, "d/config.json")
    assert error in str(found.value) and str(found.value).startswith("d/config.json")


def load(folder, rank=0, size=1, dtype=torch.float32):
    return Weights(folder, configs.read(folder), rank, size, dtype, CPU)


def changed(tmp_path, name, change):
    weights = dict(random_drafter(name).weights)
    change(weights)
    return write_folder(tmp_path / "d", CASES[name], weights)


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("name", "tensors", "error"),
    [
        ("v1", {"norm.weight": None}, "tensor 'norm.weight': is missing"),
        ("v2", {"candidate_selector.successor_codebook": None}, "tensor 'candidate_selector.successor_codebook': is"),
        ("v1", {"fc.weight": zeros(24, 48)}, "tensor 'fc.weight': shape: want [24, 72], found [24, 48]"),
        ("v1", {"layers.1.mlp.up_proj.weight": zeros(24, 40)}, "shape: want [40, 24], found [24, 40]"),
        ("v1", {"norm.weight": zeros(24, dtype=np.int64)}, "'norm.weight': dtype: want BF16 or F16 or F32, found I64"),
        (
            "v1",
            {"embed_tokens.weight": zeros(97, 24)},
            "tensor 'embed_tokens.weight': name: want a parameter of DFlash",
        ),
        ("v1", {"t2d": zeros(97, dtype=np.int64)}, "tensor 't2d': name: want a parameter of DFlash 1"),
        (
            "v1",
            {"layers.0.self_attn.q_proj.bias": zeros(80)},
            "'layers.0.self_attn.q_proj.bias': name: want a parameter",
        ),
        ("bias", {"layers.0.self_attn.k_proj.bias": None}, "'layers.0.self_attn.k_proj.bias': is missing"),
        ("v1", {"layers.0.mlp_conv.base_kernel": zeros(2, 3, 24)}, "name: want a parameter of DFlash 1"),
        ("v1", {"layers.2.mlp.up_proj.weight": zeros(40, 24)}, "tensor 'layers.2.mlp.up_proj.weight': name: want a"),
        ("v1", {"model.norm.weight": zeros(24)}, "tensor 'model.norm.weight': name: want one of its kind"),
    ],
)
def test_tensors_that_are_refused(name, tensors, error, tmp_path):
    def change(weights):
        weights |= tensors
        for key in [key for key, array in tensors.items() if array is None]:
            del weights[key]

    with pytest.raises(CheckpointError) as found:
        load(changed(tmp_path, name, change))
    assert error in str(found.value) and str(tmp_path) in str(found.value)


def test_a_key_twice_is_refused(tmp_path):
    text = json.dumps(V1).replace('"mask_token_id"', '"mask_token_id": 3, "mask_token_id"')
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json: must be JSON: two entries named 'mask_token_id'"):
        configs.read(tmp_path)


@pytest.mark.parametrize(
    ("value", "dtype", "found"),
    [
        (np.nan, torch.float32, "nan (1 such, in float32)"),
        (-np.inf, torch.float32, "-inf (1 such, in float32)"),
        (3.4e38, torch.bfloat16, "inf (1 such, in bfloat16)"),
    ],
)
def test_numbers_that_are_refused(value, dtype, found, tmp_path):
    """One of them in a matrix makes every draft NaN, which no tree takes: nothing would fail, and nothing be gained."""
    name = "layers.1.mlp.up_proj.weight"

    def change(weights):
        weights[name] = weights[name].copy()
        weights[name][3, 5] = value

    folder = changed(tmp_path, "v1", change)
    with load(folder, dtype=dtype) as weights:
        weights.take("fc.weight")
        with pytest.raises(CheckpointError) as error:
            weights.matrix("layers.1.mlp.gate_proj.weight", name)
    text = f"{folder}/model.safetensors: tensor '{name}': values: want finite numbers, found {found}"
    assert str(error.value) == text


def test_files_are_held_to_what_the_targets_are(tmp_path):
    """A header that no memory holds is refused; a link to elsewhere, as a hub's cache has, is followed."""
    folder = write_folder(tmp_path / "d", V1, random_drafter("v1").weights)
    file, elsewhere = folder / "model.safetensors", tmp_path / "blob"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    load(folder).__exit__()
    elsewhere.write_bytes((1 << 60).to_bytes(8, "little") + elsewhere.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=rf"header: length: want at most \d+ bytes, found {1 << 60}"):
        load(folder)


def test_what_is_allowed_to_differ(tmp_path):
    """The prefix, a rotary cache, bfloat16 as published, shards."""
    reference = random_drafter("v2")
    plain = write_folder(tmp_path / "plain", CASES["v2"], reference.weights)
    rotary = {"layers.0.self_attn.rotary_emb.inv_freq": zeros(5)}
    prefixed = write_folder(tmp_path / "prefixed", CASES["v2"], dict(reference.weights) | rotary, prefix="model.")
    halved = write_folder(tmp_path / "bf16", CASES["v2"], {k: bf16(v) for k, v in reference.weights.items()})
    with load(plain) as a, load(prefixed) as b, load(halved, dtype=torch.bfloat16) as c:
        for name in reference.weights:
            assert torch.equal(a.take(name), b.take(name))
            assert torch.equal(a.take(name).bfloat16(), c.take(name))
        assert torch.equal(c.exact("norm.weight"), a.exact("norm.weight").bfloat16().float())


def test_ranks_share_what_one_has(tmp_path):
    folder = write_folder(tmp_path, V1, random_drafter("v1").weights)
    parts = []
    for rank in range(4):
        with load(folder, rank, 4) as weights:
            parts.append([weights.take(f"layers.0.self_attn.{name}_proj.weight") for name in "ko"])
    with load(folder) as weights:
        assert torch.equal(torch.cat([k for k, _ in parts]), weights.take("layers.0.self_attn.k_proj.weight"))
        assert torch.equal(torch.cat([o for _, o in parts], 1), weights.take("layers.0.self_attn.o_proj.weight"))
    with pytest.raises(ValueError, match=r"tp = 3: .* can be split over \[1, 2, 4\] ranks"):
        load(folder, 0, 3)


def test_folders_that_are_not_there(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        configs.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(V1))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: no such file"):
        load(tmp_path)
