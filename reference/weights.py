"""The parameters of a model: their names and shapes, and random ones that make a useful test model."""

from __future__ import annotations

import numpy as np

from reference.config import ModelConfig

Shape = tuple[int, ...]


def layer_shapes(c: ModelConfig, i: int) -> dict[str, Shape]:
    """Parameters of layer i, by name."""
    heads, qk = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
    shapes: dict[str, Shape] = {"attn_norm": (c.hidden_size,), "mlp_norm": (c.hidden_size,)}
    if c.q_lora_rank == 0:
        shapes["w_q"] = (c.hidden_size, heads * qk)
    else:
        shapes |= {"w_q_a": (c.hidden_size, c.q_lora_rank), "q_a_norm": (c.q_lora_rank,)}
        shapes["w_q_b"] = (c.q_lora_rank, heads * qk)
    shapes |= {"w_kv_a": (c.hidden_size, c.kv_row), "kv_a_norm": (c.kv_lora_rank,)}
    shapes |= {"w_kc": (heads, c.qk_nope_head_dim, c.kv_lora_rank), "w_vc": (heads, c.kv_lora_rank, c.v_head_dim)}
    shapes["w_o"] = (heads * c.v_head_dim, c.hidden_size)
    return shapes | (mlp_shapes(c, (), c.intermediate_size, "") if i < c.first_k_dense_replace else moe_shapes(c))


def mlp_shapes(c: ModelConfig, stack: Shape, width: int, prefix: str) -> dict[str, Shape]:
    """A SwiGLU MLP of inner width `width`, or a stack of them."""
    wide, narrow = (*stack, c.hidden_size, width), (*stack, width, c.hidden_size)
    return {f"{prefix}w_gate": wide, f"{prefix}w_up": wide, f"{prefix}w_down": narrow}


def moe_shapes(c: ModelConfig) -> dict[str, Shape]:
    """Router, experts and shared expert."""
    shapes: dict[str, Shape] = {"router": (c.hidden_size, c.n_routed_experts)}
    if c.topk_method == "noaux_tc":
        shapes["router_bias"] = (c.n_routed_experts,)
    shapes |= mlp_shapes(c, (c.n_routed_experts,), c.moe_intermediate_size, "experts.")
    if c.n_shared_experts:
        shapes |= mlp_shapes(c, (), c.moe_intermediate_size * c.n_shared_experts, "shared.")
    return shapes


def shapes(c: ModelConfig) -> dict[str, Shape]:
    """Every parameter of the model, in the file's order."""
    table: dict[str, Shape] = {"embed": (c.vocab_size, c.hidden_size)}
    for i in range(c.num_hidden_layers):
        table |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(c, i).items()}
    return table | {"final_norm": (c.hidden_size,), "head": (c.hidden_size, c.vocab_size)}


# Standard deviation of an output over that of its input. Above 1 where a sharp choice is wanted: attention that picks
# out few tokens, experts far apart, a clear best token. Much larger ones make chaos: rounding alone flips experts.
GAINS = {"w_q": 1.5, "w_q_b": 1.5, "w_o": 1.5, "router": 2.0, "head": 2.0}


def draw(bits: np.random.PCG64, name: str, shape: Shape) -> np.ndarray:
    """One parameter, uniform: norms 0.7..1.3, the routing bias +-0.1, matrices by their fan-in and gain."""
    # 24 random bits are exact in float32, and random_raw is the part of numpy's random that never changes.
    size = int(np.prod(shape))
    uniform = ((bits.random_raw(size) >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - 1).reshape(shape)
    kind = name.rsplit(".", 1)[-1]
    if kind.endswith("norm"):
        return 1 + np.float32(0.3) * uniform
    if kind == "router_bias":
        return np.float32(0.1) * uniform
    fan_in = {"embed": 1, "w_kc": shape[-1]}.get(kind, shape[-2] if len(shape) > 1 else 1)
    return np.float32(GAINS.get(kind, 1.0) * np.sqrt(3 / fan_in)) * uniform


def random_weights(config: ModelConfig, bits: np.random.PCG64) -> dict[str, np.ndarray]:
    """Every parameter, drawn in the table's order."""
    return {name: draw(bits, name, shape) for name, shape in shapes(config).items()}
