"""What transformers gives for the checkpoints of tests.hf_cases: the field's own implementation, run in float32.

It reads a plain form of the same values, in float32: its classes cannot read all published forms.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests import hf_cases

LEAST_VERSION = "5.24"  # before, its DeepseekV2 ignored mscale_all_dim
NEW_TOKENS = 16
PROMPTS = (1, 12, 90)  # lengths; 64 positions are those before YaRN


def load(name: str) -> Any:
    """The model of a variant."""
    import transformers

    config = hf_cases.VARIANTS[name].config
    kind = "DeepseekV2ForCausalLM" if config["model_type"] == "deepseek_v2" else "DeepseekV3ForCausalLM"
    plainly = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float32}
    with tempfile.TemporaryDirectory() as folder:
        path = hf_cases.write_plain(name, Path(folder) / name)
        return getattr(transformers, kind).from_pretrained(path, **plainly).eval()


def prompts(name: str) -> list[np.ndarray]:
    """Token ids of each prompt of a variant."""
    variant = hf_cases.VARIANTS[name]
    bits = np.random.PCG64(1000 + variant.seed)
    vocab = np.uint64(variant.config["vocab_size"])
    return [(bits.random_raw(length) % vocab).astype(np.int64) for length in PROMPTS]


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """float32 [T, V] of a text."""
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None], use_cache=False).logits[0].float().numpy()


def run(model: Any, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The greedy continuation, int64 [NEW_TOKENS], and the logits of prompt and continuation but for its last token."""
    text = prompt
    for _ in range(NEW_TOKENS):
        text = np.append(text, logits(model, text)[-1].argmax())
    return text[len(prompt) :], logits(model, text[:-1])
