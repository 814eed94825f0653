"""The one table between the tensors of a published checkpoint and the parameters of weights.table.

A checkpoint stores a matrix as [out, in], y = W x; a parameter is [in, out]. Two things are decided here once, as an
order of the rows of a checkpoint's matrix: kv_b_proj is split per head into w_kc and w_vc, and the rotated part of
queries and of the latent row goes from interleaved pairs (x0, x1), (x2, x3) ... to halves, evens then odds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kdtp.config import ModelConfig
from kdtp.model.weights.table import span

Order: TypeAlias = NDArray[np.int64]
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class Origin:
    """A tensor of the checkpoint, its shape there, and what a parameter (or one of its experts) takes of it.

    order: the rows taken, in the parameter's order; None: all as they are. cut: what is split over the ranks: "rows"
    (those taken), "columns", or nothing. per_head: the rows are [heads, per_head]. turned: rows become columns.
    linear: the tensor is one that may be quantised.
    """

    tensor: str
    shape: tuple[int, ...]
    cut: str | None = None
    order: Order | None = None
    per_head: int = 0
    turned: bool = True
    linear: bool = True

    def rows(self, rank: int, size: int) -> slice | Order:
        """The rows that a rank takes."""
        taken = self.shape[0] if self.order is None else len(self.order)
        part = slice(*span(taken, rank, size)) if self.cut == "rows" else slice(0, taken)
        return part if self.order is None else self.order[part]

    def columns(self, rank: int, size: int) -> slice:
        """The columns that a rank takes."""
        width = self.shape[1] if len(self.shape) > 1 else 1
        return slice(*span(width, rank, size)) if self.cut == "columns" else slice(0, width)


Table: TypeAlias = dict[str, tuple[Origin, ...]]


def origins(config: ModelConfig, tied: bool) -> Table:
    """By parameter, where it comes from: one tensor, or one for each expert. tied: the head is the embedding."""
    vocab = (config.vocab_size, config.hidden_size)
    table: Table = {
        "embed": (Origin(EMBED, vocab, "rows", turned=False, linear=False),),
        "final_norm": _vector("model.norm.weight", config.hidden_size),
        "head": (Origin(EMBED if tied else HEAD, vocab, "rows", linear=False),),
    }
    for i, is_moe in enumerate(config.is_moe):
        prefix = f"model.layers.{i}."
        layer = _attention(config, prefix)
        layer |= _moe(config, f"{prefix}mlp.") if is_moe else _mlp(config, f"{prefix}mlp.", config.intermediate_size)
        table |= {f"layers.{i}.{name}": origin for name, origin in layer.items()}
    return table


def halves(width: int) -> Order:
    """Evens, then odds: from interleaved pairs to the two halves of a rotation."""
    return np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])


def _vector(tensor: str, width: int) -> tuple[Origin, ...]:
    return (Origin(tensor, (width,), turned=False, linear=False),)


def _attention(config: ModelConfig, prefix: str) -> Table:
    attn, hidden, lora = f"{prefix}self_attn.", config.hidden_size, config.kv_lora_rank
    heads, nope, v = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    kv_a = np.concatenate([np.arange(lora), lora + halves(config.qk_rope_head_dim)])
    kv_b, shape = np.arange(heads * (nope + v)).reshape(heads, nope + v), (heads * (nope + v), lora)
    kv_b_proj = f"{attn}kv_b_proj.weight"
    return _query(config, attn) | {
        "attn_norm": _vector(f"{prefix}input_layernorm.weight", hidden),
        "mlp_norm": _vector(f"{prefix}post_attention_layernorm.weight", hidden),
        "kv_a_norm": _vector(f"{attn}kv_a_layernorm.weight", lora),
        "w_kv_a": (Origin(f"{attn}kv_a_proj_with_mqa.weight", (config.kv_row, hidden), order=kv_a),),
        "w_kc": (Origin(kv_b_proj, shape, "rows", kv_b[:, :nope].reshape(-1), per_head=nope, turned=False),),
        "w_vc": (Origin(kv_b_proj, shape, "rows", kv_b[:, nope:].reshape(-1), per_head=v),),
        "w_o": (Origin(f"{attn}o_proj.weight", (hidden, heads * v), "columns"),),
    }


def _query(config: ModelConfig, attn: str) -> Table:
    heads, nope, rope = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
    head = np.concatenate([np.arange(nope), nope + halves(rope)])
    order = (np.arange(heads)[:, None] * (nope + rope) + head).reshape(-1)
    rank, hidden = config.q_lora_rank, config.hidden_size
    if rank == 0:
        return {"w_q": (Origin(f"{attn}q_proj.weight", (len(order), hidden), "rows", order),)}
    return {
        "w_q_a": (Origin(f"{attn}q_a_proj.weight", (rank, hidden)),),
        "q_a_norm": _vector(f"{attn}q_a_layernorm.weight", rank),
        "w_q_b": (Origin(f"{attn}q_b_proj.weight", (len(order), rank), "rows", order),),
    }


def _mlp(config: ModelConfig, prefix: str, width: int) -> Table:
    wide, narrow = (width, config.hidden_size), (config.hidden_size, width)
    return {
        "w_gate": (Origin(f"{prefix}gate_proj.weight", wide, "rows"),),
        "w_up": (Origin(f"{prefix}up_proj.weight", wide, "rows"),),
        "w_down": (Origin(f"{prefix}down_proj.weight", narrow, "columns"),),
    }


def _moe(config: ModelConfig, prefix: str) -> Table:
    experts, width = config.n_routed_experts, config.moe_intermediate_size
    table: Table = {"router": (Origin(f"{prefix}gate.weight", (experts, config.hidden_size), linear=False),)}
    if config.topk_method == "noaux_tc":
        table["router_bias"] = _vector(f"{prefix}gate.e_score_correction_bias", experts)
    each = [_mlp(config, f"{prefix}experts.{expert}.", width) for expert in range(experts)]
    table |= {f"experts.{name}": tuple(mlp[name][0] for mlp in each) for name in each[0]}
    if config.n_shared_experts:
        shared = _mlp(config, f"{prefix}shared_experts.", width * config.n_shared_experts)
        table |= {f"shared.{name}": origin for name, origin in shared.items()}
    return table
