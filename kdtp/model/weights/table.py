"""The parameters of a model: name, shape, and how each is split over the ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kdtp.config import ModelConfig


@dataclass(frozen=True)
class Param:
    """One parameter, float32 row-major in the file, y = x @ W with W [in, out].

    axis: the dimension that is cut into one part per rank; None: every rank holds all of it. exact: stays float32
    whatever the dtype of the model (norms and router).
    """

    shape: tuple[int, ...]
    axis: int | None = None
    exact: bool = False

    def part(self, rank: int, size: int) -> tuple[slice, ...]:
        """What `rank` of `size` holds. Only the vocabulary may be uneven: its last parts are then shorter."""
        if self.axis is None:
            return ()
        first, last = span(self.shape[self.axis], rank, size)
        return (*[slice(None)] * self.axis, slice(first, last))

    def held(self, rank: int, size: int) -> tuple[int, ...]:
        """Shape of what `rank` of `size` holds."""
        if self.axis is None:
            return self.shape
        first, last = span(self.shape[self.axis], rank, size)
        return (*self.shape[: self.axis], last - first, *self.shape[self.axis + 1 :])


def span(width: int, rank: int, size: int) -> tuple[int, int]:
    """First and past-the-last index of the part of `width` that `rank` of `size` holds."""
    each = -(-width // size)
    return min(rank * each, width), min((rank + 1) * each, width)


def parameters(config: ModelConfig) -> dict[str, Param]:
    """Every parameter of a model by its name in the file."""
    vocab, hidden = config.vocab_size, config.hidden_size
    table = {"embed": Param((vocab, hidden), 0)}
    for i, is_moe in enumerate(config.is_moe):
        layer = _attention(config) | (_moe(config) if is_moe else _mlp(hidden, config.intermediate_size))
        table |= {f"layers.{i}.{name}": param for name, param in layer.items()}
    return table | {"final_norm": _exact(hidden), "head": Param((hidden, vocab), 1)}


def _attention(config: ModelConfig) -> dict[str, Param]:
    hidden, heads, latent = config.hidden_size, config.num_attention_heads, config.kv_lora_rank
    query = heads * (config.qk_nope_head_dim + config.qk_rope_head_dim)
    table = {"attn_norm": _exact(hidden), "mlp_norm": _exact(hidden), "kv_a_norm": _exact(latent)}
    if config.q_lora_rank == 0:
        table["w_q"] = Param((hidden, query), 1)
    else:
        table["w_q_a"] = Param((hidden, config.q_lora_rank))
        table["q_a_norm"] = _exact(config.q_lora_rank)
        table["w_q_b"] = Param((config.q_lora_rank, query), 1)
    table["w_kv_a"] = Param((hidden, config.kv_row))
    table["w_kc"] = Param((heads, config.qk_nope_head_dim, latent), 0)
    table["w_vc"] = Param((heads, latent, config.v_head_dim), 0)
    table["w_o"] = Param((heads * config.v_head_dim, hidden), 0)
    return table


def _mlp(hidden: int, width: int) -> dict[str, Param]:
    return {
        "w_gate": Param((hidden, width), 1),
        "w_up": Param((hidden, width), 1),
        "w_down": Param((width, hidden), 0),
    }


def _moe(config: ModelConfig) -> dict[str, Param]:
    hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
    table = {"router": _exact(hidden, experts)}
    if config.topk_method == "noaux_tc":
        table["router_bias"] = _exact(experts)
    for name, one in _mlp(hidden, width).items():
        assert one.axis is not None
        table[f"experts.{name}"] = replace(one, shape=(experts, *one.shape), axis=one.axis + 1)
    if config.n_shared_experts:
        shared = _mlp(hidden, width * config.n_shared_experts)
        table |= {f"shared.{name}": param for name, param in shared.items()}
    return table


def _exact(*shape: int) -> Param:
    return Param(shape, exact=True)
