"""The target as it is trained: MLA and experts in plain PyTorch. Parameters have their published names.

Experts are stacked: `mlp.experts.gate_up` [E, 2 * I, H] and `mlp.experts.down` [E, H, I], each matrix [out, in]. All
experts see all tokens, and those that a token did not choose count nothing: for a small model two large products are
faster than many small ones, and the sum has one order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from kdtp.config import ConfigError, ModelConfig
from kdtp.model import rope
from kdtp.train import int4


class Cache:
    """Keys and values of a batch's tokens so far, per layer."""

    def __init__(self, config: ModelConfig, batch: int, length: int, dtype: torch.dtype, device: torch.device) -> None:
        width = config.qk_nope_head_dim + config.qk_rope_head_dim
        shape = (config.num_hidden_layers, batch, config.num_attention_heads, length, width)
        self._keys, self._values = (torch.empty(shape, dtype=dtype, device=device) for _ in "kv")

    def add(self, layer: int, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k, v [B, h, n, d] of positions start .. start + n - 1 -> all up to there."""
        end = start + k.shape[2]
        self._keys[layer, :, :, start:end], self._values[layer, :, :, start:end] = k, v
        return self._keys[layer, :, :, :end], self._values[layer, :, :, :end]


class Norm(nn.Module):
    """RMS norm, made in float32; its result is what products take."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self._eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = functional.rms_norm(x.float(), self.weight.shape, self.weight, self._eps)
        kind = x.device.type
        return y.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else y


def _linear(width: int, out: int, scale: float = 1.0) -> nn.Linear:
    layer = nn.Linear(width, out, bias=False)
    nn.init.normal_(layer.weight, std=scale * width**-0.5)
    return layer


class Attention(nn.Module):
    """Multi-head latent attention, keys and values written out per head."""

    def __init__(self, config: ModelConfig, scale: float) -> None:
        super().__init__()
        self._config = config
        heads, nope, rotated = config.num_attention_heads, config.qk_nope_head_dim, config.qk_rope_head_dim
        hidden, lora, eps = config.hidden_size, config.kv_lora_rank, config.rms_norm_eps
        self.q_a_proj = _linear(hidden, config.q_lora_rank)
        self.q_a_layernorm = Norm(config.q_lora_rank, eps)
        self.q_b_proj = _linear(config.q_lora_rank, heads * (nope + rotated))
        self.kv_a_proj_with_mqa = _linear(hidden, lora + rotated)
        self.kv_a_layernorm = Norm(lora, eps)
        self.kv_b_proj = _linear(lora, heads * (nope + config.v_head_dim))
        self.o_proj = _linear(heads * config.v_head_dim, hidden, scale)

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], layer: int, cache: Cache | None, start: int) -> Tensor:
        """x [B, n, H] -> [B, n, H]; positions start .. start + n - 1."""
        c, (batch, n, _) = self._config, x.shape
        heads, nope, rotated, width = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, n, heads, -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, rotated], -1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, n, heads, -1)
        q = torch.cat([q[..., :nope], _rotated(q[..., nope:], angles)], -1)
        k_rope = _rotated(k_rope[:, :, None], angles).expand(-1, -1, heads, -1)
        k = torch.cat([kv[..., :nope], k_rope], -1)
        v = functional.pad(kv[..., nope:], (0, nope + rotated - width))  # fast kernels want one width
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if cache is not None:
            assert start == 0 or n == 1, (start, n)
            k, v = cache.add(layer, start, k, v)
        scale = rope.softmax_scale(c)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=start == 0, scale=scale)
        return self.o_proj(out[..., :width].transpose(1, 2).reshape(batch, n, -1))  # type: ignore[no-any-return]


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """x [B, n, h, d] in interleaved pairs, as published."""
    cos, sin = angles
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2).to(x.dtype)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden: int, width: int, scale: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = _linear(hidden, width), _linear(hidden, width)
        self.down_proj = _linear(width, hidden, scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Gate(nn.Module):
    """The router: sigmoid scores; a bias chooses and does not weigh. Stored in bfloat16, and trained so."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self._topk, self._norm = config.num_experts_per_tok, config.norm_topk_prob
        self._scale = config.routed_scaling_factor
        self.weight = nn.Parameter(torch.randn(config.n_routed_experts, config.hidden_size) * config.hidden_size**-0.5)
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.load = torch.zeros(config.n_routed_experts)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., H] -> each expert's weight, 0 where it was not chosen, float32 [..., E]."""
        with torch.autocast(x.device.type, enabled=False):
            scores = functional.linear(x.float(), int4.rounded_bf16(self.weight)).sigmoid()
        bias = self.get_buffer("e_score_correction_bias")
        chosen = (scores.detach() + bias).topk(self._topk, -1).indices
        picked = torch.zeros_like(scores).scatter_(-1, chosen, 1.0)
        self.load = picked.flatten(0, -2).sum(0)
        weights = scores * picked
        return weights / ((weights.sum(-1, keepdim=True) + 1e-20) if self._norm else 1.0) * self._scale

    @torch.no_grad()
    def rebalance(self, step: float) -> None:
        """Raise the bias of experts that the last batch chose too seldom, and lower the others' (DeepSeek-V3)."""
        self.get_buffer("e_score_correction_bias").add_((self.load.mean() - self.load).sign(), alpha=step)


class Experts(nn.Module):
    """Routed experts; `quantised` says that the weights have INT4's values already."""

    def __init__(self, config: ModelConfig, scale: float) -> None:
        super().__init__()
        experts, width, hidden = config.n_routed_experts, config.moe_intermediate_size, config.hidden_size
        self.quantised = False
        self.gate_up = nn.Parameter(torch.randn(experts, 2 * width, hidden) * hidden**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * scale * width**-0.5)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        """x [..., H], weights [..., E] -> [..., H]."""
        gate_up, down = (self.gate_up, self.down) if self.quantised else map(int4.rounded, (self.gate_up, self.down))
        both = functional.linear(x, gate_up.flatten(0, 1))
        gate, up = both.view(*x.shape[:-1], len(gate_up), -1).chunk(2, -1)
        inner = functional.silu(gate) * up * weights[..., None].to(gate.dtype)
        return functional.linear(inner.flatten(-2), down.transpose(0, 1).flatten(1))


class Moe(nn.Module):
    """Routed experts and the shared one."""

    def __init__(self, config: ModelConfig, scale: float) -> None:
        super().__init__()
        self.gate, self.experts = Gate(config), Experts(config, scale)
        self.shared_experts = Mlp(config.hidden_size, config.moe_intermediate_size * config.n_shared_experts, scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x)) + self.shared_experts(x)  # type: ignore[no-any-return]


class Layer(nn.Module):
    """A pre-norm layer."""

    def __init__(self, config: ModelConfig, is_moe: bool) -> None:
        super().__init__()
        scale = 0.2 * (2 * config.num_hidden_layers) ** -0.5  # at first a layer adds little to the embedding
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, scale)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        dense = config.hidden_size, config.intermediate_size
        self.mlp = Moe(config, scale) if is_moe else Mlp(*dense, scale)


class Target(nn.Module):
    """A model of the Kimi layout; dropout applies in training only. ConfigError for what it cannot be."""

    def __init__(self, config: ModelConfig, tied: bool, dropout: float = 0.0) -> None:
        super().__init__()
        _check(config)
        self.config, self.tied = config, tied
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.model.embed_tokens.weight, std=0.02)
        self.model.layers = nn.ModuleList(Layer(config, is_moe) for is_moe in config.is_moe)
        self.model.norm = Norm(config.hidden_size, config.rms_norm_eps)
        if not tied:
            self.lm_head = _linear(config.hidden_size, config.vocab_size)
        self.drop = nn.Dropout(dropout)
        frequencies = rope.inverse_frequencies(config)
        angles = torch.arange(config.max_position_embeddings, dtype=torch.float64)[:, None, None] * frequencies
        amplitude = rope.amplitude(config.rope_scaling)
        self.register_buffer("_cos", (angles.cos() * amplitude).float(), persistent=False)
        self.register_buffer("_sin", (angles.sin() * amplitude).float(), persistent=False)

    @property
    def embedding(self) -> Tensor:
        """[V, H]."""
        return self.model.embed_tokens.weight  # type: ignore[union-attr, return-value]

    @property
    def head(self) -> Tensor:
        """[V, H]."""
        return self.embedding if self.tied else self.lm_head.weight

    def hidden(
        self, tokens: Tensor, taps: Sequence[int] = (), cache: Cache | None = None, start: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """tokens int64 [B, n] -> normed outputs [B, n, H], and the residual stream after each of the layers `taps`."""
        angles = tuple(self.get_buffer(name)[start : start + tokens.shape[1]] for name in ("_cos", "_sin"))
        x = self.drop(functional.embedding(tokens, self.embedding))
        after = []
        for i, layer in enumerate(self.model.layers):  # type: ignore[arg-type]
            x = x + self.drop(layer.self_attn(layer.input_layernorm(x), angles, i, cache, start))
            x = x + self.drop(layer.mlp(layer.post_attention_layernorm(x)))
            after.append(x)
        return self.model.norm(x), [after[i] for i in taps]  # type: ignore[operator]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [..., V] of normed outputs."""
        return functional.linear(hidden, self.head).float()

    @property
    def gates(self) -> list[Gate]:
        """The routers."""
        return [module for module in self.modules() if isinstance(module, Gate)]

    @property
    def experts(self) -> list[Experts]:
        """The routed experts of all layers."""
        return [module for module in self.modules() if isinstance(module, Experts)]


def _check(config: ModelConfig) -> None:
    experts = config.first_k_dense_replace < config.num_hidden_layers
    wanted = {"q_lora_rank": config.q_lora_rank >= 1}
    if experts:
        widths = config.hidden_size % int4.GROUP == 0 and config.moe_intermediate_size % int4.GROUP == 0
        wanted |= {
            "topk_method": config.topk_method == "noaux_tc",
            "n_group": config.n_group == 1,
            "n_shared_experts": config.n_shared_experts >= 1,
            "moe_intermediate_size": widths,
        }
    legal = f"q_lora, noaux_tc, one group, a shared expert, widths of experts that are multiples of {int4.GROUP}"
    for key, ok in wanted.items():
        if not ok:
            raise ConfigError(f"{key} = {getattr(config, key)!r}: a model to train has {legal}", key)
