"""The layers of a DFlash drafter: attention of a block over the target's features, SwiGLU, dynamic convolutions.

x is the blocks of B sequences, [B * n, H] with n slots each. Heads and the MLP's inner width are this rank's; sums over
the ranks are made here, so that every x is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from kdtp import kernels
from kdtp.draft.dflash.weights import Weights
from kdtp.model.layers import Mlp, Norm

if TYPE_CHECKING:
    from kdtp.model.comm import Comm


@dataclass(frozen=True)
class Angles:
    """cos and sin of M rows, float32 [M, 1, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[M, heads, head_dim] in NeoX order: pair j is entries j and j + head_dim / 2."""
        first, second = x.float().chunk(2, -1)
        turned = [first * self.cos - second * self.sin, second * self.cos + first * self.sin]
        return torch.cat(turned, -1).to(x.dtype)


@dataclass(frozen=True)
class View:
    """What blocks of n slots see in a layer: rows int64 [B, N] of the context, the last of them next to the block, and
    of these and the block a mask, bool [B, n, N + n]."""

    rows: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Attention:
    """GQA with a norm per head. w_q [H, h * d], w_kv [H, 2 * kv * d] (keys, then values), w_o [h * d, H]."""

    head_dim: int
    w_q: torch.Tensor
    w_kv: torch.Tensor
    w_o: torch.Tensor
    q_norm: Norm
    k_norm: Norm
    q_bias: torch.Tensor | None
    kv_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    comm: Comm

    def keys_values(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """What is seen of rows x [M, H]: rotated keys and values, [2, M, kv, d]."""
        k, v = self._heads(x, self.w_kv, self.kv_bias).chunk(2, 1)
        return torch.stack([angles.rotate(self._normed(k, self.k_norm)), v])

    def __call__(self, x: torch.Tensor, angles: Angles, context: torch.Tensor, view: View) -> torch.Tensor:
        """context [2, rows, kv, d]: keys and values of committed rows, of all sequences -> [B * n, H]."""
        q = angles.rotate(self._normed(self._heads(x, self.w_q, self.q_bias), self.q_norm))
        block = self.keys_values(x, angles)
        block = block.view(2, len(view.rows), -1, *block.shape[2:])
        heads = _attend(q, torch.cat([context[:, view.rows], block], 2), view.mask)
        out = self.comm.all_reduce(kernels.linear(heads, self.w_o))
        return out if self.o_bias is None else out + self.o_bias

    def _heads(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = kernels.linear(x, w)
        return (y if bias is None else y + bias).view(len(x), -1, self.head_dim)

    def _normed(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        return norm(x.reshape(-1, self.head_dim)).view(x.shape)


def _attend(q: torch.Tensor, kv: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """q [B * n, h, d] over kv [2, B, N, kv heads, d] where mask [B, n, N] says -> [B * n, h * d]."""
    batch, n, seen = mask.shape
    keys, values = kv.transpose(2, 3).unbind()  # [B, kv heads, N, d]
    heads, d = keys.shape[1], q.shape[2]
    grouped = q.view(batch, n, heads, -1, d).permute(0, 2, 3, 1, 4).reshape(batch, heads, -1, d)
    scores = (grouped @ keys.mT).float() * d**-0.5
    weights = scores.view(batch, heads, -1, n, seen).masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
    out: torch.Tensor = weights.to(q.dtype).view(scores.shape) @ values
    return out.view(batch, heads, -1, n, d).permute(0, 3, 1, 2, 4).reshape(len(q), -1)


@dataclass(frozen=True)
class Convolution:
    """Grouped dynamic causal convolution around a sublayer (DFlash2): base [2, taps, H], before and behind it;
    w_kernel [H, 2 * taps * groups] makes what is added to `base`, alike for the channels of a group, for each slot.

    Every rank does all of it.
    """

    base: torch.Tensor
    w_kernel: torch.Tensor

    def kernels(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of slots x [M, H], for before and behind the sublayer: [M, taps, H] each."""
        sides, taps, hidden = self.base.shape
        dynamic = kernels.linear(x, self.w_kernel).view(len(x), sides, taps, -1, 1)
        spread = dynamic.expand(-1, -1, -1, -1, hidden // dynamic.shape[3]).flatten(3)
        before, behind = (self.base + spread).unbind(1)
        return before, behind


def convolve(x: torch.Tensor, kernel: torch.Tensor, n: int) -> torch.Tensor:
    """x [B * n, H] with kernel [B * n, taps, H]: tap t multiplies the slot t places before, if the block has it."""
    blocks = x.view(-1, n, x.shape[1])
    shifted = [functional.pad(blocks, (0, 0, t, 0))[:, :n] for t in range(kernel.shape[1])]
    return (torch.stack(shifted, 2).view(kernel.shape) * kernel).sum(1)


@dataclass(frozen=True)
class Layer:
    """A pre-norm decoder layer; the convolutions are None in version 1."""

    attention_norm: Norm
    attention: Attention
    mlp_norm: Norm
    mlp: Mlp
    attention_conv: Convolution | None
    mlp_conv: Convolution | None
    comm: Comm

    def __call__(self, x: torch.Tensor, angles: Angles, context: torch.Tensor, view: View) -> torch.Tensor:
        """As Attention."""
        n = view.mask.shape[1]
        y = self.attention_norm(x)
        if self.attention_conv is None:
            x = x + self.attention(y, angles, context, view)
        else:
            before, behind = self.attention_conv.kernels(y)
            x = x + convolve(self.attention(convolve(y, before, n), angles, context, view), behind, n)
        y = self.mlp_norm(x)
        if self.mlp_conv is None:
            return x + self.comm.all_reduce(self.mlp(y))
        before, behind = self.mlp_conv.kernels(y)
        return x + convolve(self.comm.all_reduce(self.mlp(convolve(y, before, n))), behind, n)


def layer(weights: Weights, comm: Comm, i: int) -> Layer:
    """Layer i, of this rank."""
    config, at = weights.config, f"layers.{i}."

    def norm(name: str) -> Norm:
        return Norm(weights.exact(f"{at}{name}.weight"), config.rms_norm_eps)

    def matrix(*names: str) -> torch.Tensor:
        return weights.matrix(*[f"{at}{name}_proj.weight" for name in names])

    def bias(*names: str) -> torch.Tensor | None:
        return weights.bias(*[f"{at}{name}_proj.bias" for name in names])

    def convolution(name: str) -> Convolution | None:
        if config.version == 1:
            return None
        return Convolution(
            weights.take(f"{at}{name}.base_kernel"), weights.matrix(f"{at}{name}.kernel_projection.weight")
        )

    q, k, v, o = (f"self_attn.{name}" for name in "qkvo")
    attention = Attention(
        config.head_dim,
        matrix(q),
        matrix(k, v),
        matrix(o),
        norm("self_attn.q_norm"),
        norm("self_attn.k_norm"),
        bias(q),
        bias(k, v),
        bias(o),
        comm,
    )
    mlp = Mlp(matrix("mlp.gate", "mlp.up"), matrix("mlp.down"))
    convolutions = convolution("attention_conv"), convolution("mlp_conv")
    return Layer(norm("input_layernorm"), attention, norm("post_attention_layernorm"), mlp, *convolutions, comm)
