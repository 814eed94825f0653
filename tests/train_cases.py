"""A tiny recipe of each kind, a corpus of some modules, and runs of `kdtp train` with them."""

import json
import sysconfig
from pathlib import Path
from typing import Any

from kdtp.__main__ import main

MODEL: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "torch_dtype": "bfloat16",
    "vocab_size": 384,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "num_attention_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "intermediate_size": 48,
    "moe_intermediate_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": True,
}
_TRAIN = {"batch": 4, "epochs": 100, "learning_rate": 3e-3, "weight_decay": 0.1, "warmup": 0.1}
TARGET = {"model": MODEL, "train": _TRAIN | {"seq": 32, "dropout": 0.1, "balance": 0.01}}
_DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "torch_dtype": "bfloat16",
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "is_causal": False,
    "block_size": 4,
    "dflash_config": {"target_layer_ids": [0, 1]},
}
_SECOND = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 8, "selector_top_k": 6}
_DRAFT = {"seq": 48, "prompt": 16, "samples": 32, "temperatures": [0.0, 1.0], "anchors": 6, "decay": 4.0}
DRAFTERS = {
    1: {"model": _DRAFTER, "train": _TRAIN | _DRAFT},
    2: {
        "model": _DRAFTER
        | {"architectures": ["DFlash2DraftModel"], "dflash_config": _DRAFTER["dflash_config"] | _SECOND},
        "train": _TRAIN | _DRAFT,
    },
}
# Of both sides of the split: textwrap is held out.
_MODULES = ("bisect", "copy", "fnmatch", "heapq", "keyword", "queue", "sched", "shlex", "stat", "textwrap")


def write_corpus(folder: Path) -> Path:
    """Some modules of the standard library."""
    folder.mkdir()
    for module in _MODULES:
        source = Path(sysconfig.get_path("stdlib")) / f"{module}.py"
        (folder / source.name).write_bytes(source.read_bytes())
    return folder


def write_recipe(path: Path, recipe: dict[str, Any]) -> Path:
    path.write_text(json.dumps(recipe))
    return path


def train(kind: str, out: Path, *flags: str | Path) -> int:
    """`kdtp train KIND --out OUT …`: its exit code."""
    return main(["train", kind, "--out", str(out), *map(str, flags)])


def losses(out: Path) -> dict[int, float]:
    """By step."""
    lines = map(json.loads, (out / "training" / "loss.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}
