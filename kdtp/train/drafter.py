"""The DFlash drafter as it is trained, versions 1 and 2 in plain PyTorch. Parameters have their published names.

Many blocks of a sequence are drafted at once: S sequences with T tokens of context, A blocks each, n slots per block.
What the network computes for one block: reference/dflash.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from kdtp.config import ConfigError
from kdtp.draft.dflash.config import DFlashConfig
from kdtp.model import rope
from kdtp.train.target import Norm

# Settings that change what the published network computes, and that are not trained here.
_PLAIN = {
    "attention_bias": False,
    "input_embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "final_logit_softcapping": 0.0,
}


@dataclass(frozen=True)
class Places:
    """Where context and slots are: positions int64 of the blocks' slots [S, A * n], angles of context rows and slots,
    and by kind of layer (window, causal) what a slot sees, bool [S, 1, A * n, T + A * n]."""

    context: tuple[Tensor, Tensor]
    slots: tuple[Tensor, Tensor]
    masks: dict[tuple[int, bool], Tensor]


def _linear(width: int, out: int, scale: float = 1.0) -> nn.Linear:
    layer = nn.Linear(width, out, bias=False)
    nn.init.normal_(layer.weight, std=scale * width**-0.5)
    return layer


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """x [S, m, heads, d] in NeoX order."""
    first, second = x.float().chunk(2, -1)
    cos, sin = angles
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


class Attention(nn.Module):
    """Queries of the blocks over context and block."""

    def __init__(self, c: DFlashConfig, scale: float) -> None:
        super().__init__()
        self._d, self._groups = c.head_dim, c.num_attention_heads // c.num_key_value_heads
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj, self.k_proj = _linear(c.hidden_size, queries), _linear(c.hidden_size, keys)
        self.v_proj, self.o_proj = _linear(c.hidden_size, keys), _linear(queries, c.hidden_size, scale)
        self.q_norm, self.k_norm = Norm(c.head_dim, c.rms_norm_eps), Norm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, context: Tensor, places: Places, mask: Tensor) -> Tensor:
        """x [S, A * n, H], context [S, T, H] -> [S, A * n, H]."""
        q = _rotated(self.q_norm(self._heads(self.q_proj(x))), places.slots)
        keys = [(context, places.context), (x, places.slots)]
        k = torch.cat([_rotated(self.k_norm(self._heads(self.k_proj(rows))), at) for rows, at in keys], 1)
        v = torch.cat([self._heads(self.v_proj(rows)) for rows, _ in keys], 1)
        k, v = (part.repeat_interleave(self._groups, 2).transpose(1, 2) for part in (k.to(v.dtype), v))
        q = q.to(v.dtype).transpose(1, 2)
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self._d)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, c: DFlashConfig, scale: float) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (_linear(c.hidden_size, c.intermediate_size) for _ in range(2))
        self.down_proj = _linear(c.intermediate_size, c.hidden_size, scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Convolution(nn.Module):
    """Grouped dynamic causal convolution around a sublayer; it begins as no convolution at all."""

    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        taps, hidden = c.conv_kernel_size, c.hidden_size
        self._shape, self._group, self._slots = (2, taps, hidden // c.conv_group_size), c.conv_group_size, c.block_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        nn.init.ones_(self.base_kernel[:, 0])
        self.kernel_projection = _linear(hidden, 2 * taps * (hidden // c.conv_group_size), 0.0)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """For before and behind the sublayer, of rows x [..., H]: [..., taps, H] each."""
        dynamic = self.kernel_projection(x).view(*x.shape[:-1], *self._shape).repeat_interleave(self._group, -1)
        before, behind = (self.base_kernel + dynamic).unbind(-3)
        return before, behind

    def apply_kernel(self, x: Tensor, kernel: Tensor) -> Tensor:
        """x [S, A * n, H]: tap t multiplies the slot t places before, if the block has it."""
        blocks = x.view(len(x), -1, self._slots, x.shape[-1])
        shifted = [functional.pad(blocks, (0, 0, t, 0))[:, :, : self._slots] for t in range(self._shape[1])]
        return (torch.stack(shifted, -2).flatten(1, 2) * kernel).sum(-2)


class Layer(nn.Module):
    """A pre-norm layer; version 2 has a convolution around each half."""

    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        scale = 0.2 * (2 * c.num_hidden_layers) ** -0.5
        self.input_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, scale)
        self.post_attention_layernorm = Norm(c.hidden_size, c.rms_norm_eps)
        self.mlp = Mlp(c, scale)
        self.attention_conv = Convolution(c) if c.version == 2 else None
        self.mlp_conv = Convolution(c) if c.version == 2 else None

    def forward(self, x: Tensor, context: Tensor, places: Places, mask: Tensor) -> Tensor:
        """As Attention."""
        y = self.input_layernorm(x)
        if self.attention_conv is None or self.mlp_conv is None:
            x = x + self.self_attn(y, context, places, mask)
            return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]
        before, behind = self.attention_conv.kernels(y)
        y = self.self_attn(self.attention_conv.apply_kernel(y, before), context, places, mask)
        x = x + self.attention_conv.apply_kernel(y, behind)
        y = self.post_attention_layernorm(x)
        before, behind = self.mlp_conv.kernels(y)
        return x + self.mlp_conv.apply_kernel(self.mlp(self.mlp_conv.apply_kernel(y, before)), behind)


class Selector(nn.Module):
    """Scores of a slot's candidates after their predecessor; they begin as 0."""

    def __init__(self, c: DFlashConfig) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.randn(c.vocab_size, c.selector_rank))
        self.successor_codebook = nn.Parameter(torch.zeros(c.vocab_size, c.selector_rank))
        self.hidden_projection = _linear(c.hidden_size, c.selector_rank)

    def forward(self, hidden: Tensor, before: Tensor, candidates: Tensor) -> Tensor:
        """hidden [..., H], before int64 [...], candidates int64 [..., K] -> float32 [..., K]."""
        gate = self.hidden_projection(hidden).float() * functional.embedding(before, self.predecessor_codebook)
        return (functional.embedding(candidates, self.successor_codebook) @ gate[..., None])[..., 0].float()  # type: ignore[no-any-return]


class Drafter(nn.Module):
    """A drafter; embedding and head are the target's, and not part of it. ConfigError for what is not trained here."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        for key, plain in _PLAIN.items():
            if getattr(config, key) != plain:
                raise ConfigError(f"{key} = {getattr(config, key)!r}: must be {plain} in a drafter to be trained", key)
        self.config = config
        self.fc = _linear(config.features, config.hidden_size)
        self.hidden_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.candidate_selector = Selector(config) if config.version == 2 else None
        frequencies = rope.frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.register_buffer("_frequencies", frequencies, persistent=False)

    def forward(self, features: Tensor, starts: Tensor, roots: Tensor, embedding: Tensor) -> Tensor:
        """Normed outputs of all slots, [S, A, n, H].

        features [S, T, taps * H]: of positions 0 .. T - 1; starts int64 [S, A]: the position of each block's root,
        which sees what is before it; roots int64 [S, A]; embedding [V, H].
        """
        n = self.config.block_size
        context = self.hidden_norm(self.fc(features))
        tokens = roots.new_full((*roots.shape, n), self.config.mask_token_id)
        tokens[..., 0] = roots
        x = functional.embedding(tokens, embedding).flatten(1, 2).float()
        places = self._places(features.shape[1], starts)
        for layer, kind in zip(self.layers, self._kinds, strict=True):
            x = layer(x, context, places, places.masks[kind])
        return self.norm(x).view(*tokens.shape, -1)  # type: ignore[no-any-return]

    @property
    def _kinds(self) -> list[tuple[int, bool]]:
        return list(zip(self.config.windows, self.config.causal, strict=True))

    def _places(self, length: int, starts: Tensor) -> Places:
        n, device = self.config.block_size, starts.device
        context = torch.arange(length, device=device)
        slots = (starts[..., None] + torch.arange(n, device=device)).flatten(1)
        first = starts.repeat_interleave(n, 1)[..., None]  # of each slot's block
        block = torch.arange(slots.shape[1], device=device) // n
        own = (block[:, None] == block).expand(len(slots), -1, -1)
        seen = torch.cat([(context < first), own], -1)
        keys = torch.cat([context.expand(len(slots), -1), slots], 1)
        ahead = keys[:, None] - slots[..., None]
        masks = {}
        for window, causal in set(self._kinds):
            mask = seen & (ahead <= 0) if causal else seen
            masks[window, causal] = (mask & (ahead.abs() < window) if window else mask)[:, None]
        return Places(self._angles(context[None]), self._angles(slots), masks)

    def _angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None, None] * self.get_buffer("_frequencies")
        said = self.config.rope_amplitude
        amplitude = rope.amplitude(self.config.rope_scaling) if said is None else said
        return (angles.cos() * amplitude).float(), (angles.sin() * amplitude).float()
