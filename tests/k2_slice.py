"""Two layers of Kimi K2 at their true width (one dense, one with experts; fewer experts and words), random weights.

`Slice` makes the values on a device, writes them as published (bfloat16, or INT4 experts), and builds the field's own
implementation of the same values, transformers' DeepseekV3, which is the reference.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kdtp.model.weights import safetensors
from tests.hf_cases import GROUP, INT4, shapes

CONFIG: dict[str, Any] = {
    "model_type": "kimi_k2",
    "vocab_size": 8192,
    "hidden_size": 7168,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 48,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.827,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 64,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "max_position_embeddings": 262144,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
_GAINS = {"gate": 3.0, "lm_head": 2.0, "embed_tokens": 0.0}


class Slice:
    """Values of a slice, bfloat16 by published names; those of INT4 experts float32. `stored`: as in the file."""

    def __init__(self, config: dict[str, Any], int4: bool, device: torch.device) -> None:
        self.config = config | ({"quantization_config": INT4} if int4 else {})
        self.values: dict[str, torch.Tensor] = {}
        self.stored: dict[str, tuple[str, np.ndarray]] = {}
        generator = torch.Generator(device).manual_seed(1)
        for name, shape in shapes(config):
            drawn = _draw(name, shape, generator)
            if int4 and ".mlp.experts." in name:
                self._add_int4(name, drawn)
            elif name.endswith("bias"):
                self.values[name], self.stored[name] = drawn, ("F32", drawn.cpu().numpy())
            else:
                self.values[name] = drawn.bfloat16()
                self.stored[name] = "BF16", _bits(self.values[name])

    def _add_int4(self, name: str, values: torch.Tensor) -> None:
        groups = values.view(values.shape[0], -1, GROUP)
        scales = (groups.abs().amax(-1) / 7.5).bfloat16()
        q = (groups / scales[..., None].float()).round().clamp(-8, 7)
        self.values[name] = (q * scales[..., None].float()).flatten(1)
        nibbles = (q.flatten(1).view(values.shape[0], -1, 8) + 8).long() << 4 * torch.arange(8, device=q.device)
        words, base = nibbles.sum(-1), name.removesuffix("weight")
        words = torch.where(words < 2**31, words, words - 2**32).int()
        self.stored[f"{base}weight_packed"] = "I32", words.cpu().numpy()
        self.stored[f"{base}weight_scale"] = "BF16", _bits(scales)
        self.stored[f"{base}weight_shape"] = "I32", np.array(values.shape, np.int32)

    def write(self, folder: Path) -> Path:
        """The checkpoint."""
        (folder / "config.json").write_text(json.dumps(self.config))
        safetensors.write(folder / "model.safetensors", self.stored)
        return folder

    def reference(self, dtype: torch.dtype) -> Any:
        """transformers' model of these values, in `dtype`; the routing bias stays float32."""
        from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

        plain = {key: value for key, value in self.config.items() if key not in ("model_type", "quantization_config")}
        device = self.values["lm_head.weight"].device
        with torch.device(device):
            config = DeepseekV3Config(**plain, attn_implementation="eager", experts_implementation="eager")
            model = DeepseekV3ForCausalLM(config).to(dtype).eval()
        state = {name: values for name, values in self.values.items() if ".mlp.experts." not in name}
        for i in range(self.config["first_k_dense_replace"], self.config["num_hidden_layers"]):
            experts = f"model.layers.{i}.mlp.experts"
            count = range(self.config["n_routed_experts"])
            gate, up, down = (
                torch.stack([self.values[f"{experts}.{e}.{kind}_proj.weight"].to(dtype) for e in count])
                for kind in ("gate", "up", "down")
            )
            state |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), f"{experts}.down_proj": down}
        model.load_state_dict(state, strict=True)
        for layer in model.model.layers[self.config["first_k_dense_replace"] :]:
            layer.mlp.gate.e_score_correction_bias = layer.mlp.gate.e_score_correction_bias.float()
        return model


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Gaussian, by fan-in; norms near 1."""
    drawn = torch.randn(shape, generator=generator, device=generator.device)
    if "norm" in name:
        return 1 + 0.1 * drawn
    if name.endswith("bias"):
        return 0.05 * drawn
    gain = _GAINS.get(name.split(".")[-2], 1.0)
    return drawn * gain * shape[-1] ** -0.5 if gain else drawn


def _bits(values: torch.Tensor) -> np.ndarray:
    return values.cpu().view(torch.int16).numpy().view(np.uint16)


def logits(model: Any, text: list[int]) -> np.ndarray:
    """float32 [T, V] of the reference."""
    with torch.no_grad():
        ids = torch.tensor([text], device=model.device)
        return model(ids, use_cache=False).logits[0].float().cpu().numpy()
