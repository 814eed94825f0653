"""The layers of a DFlash drafter: attention of a block over the target's features, SwiGLU, dynamic convolutions.

x is the blocks of B sequences, [B * n, H] with n slots each. Heads and the MLP's inner width are this rank's; sums over
the ranks are made here, so that every x is whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kdtp import kernels
from kdtp.draft.dflash.weights import Weights
from kdtp.model.layers import Mlp, Norm

if TYPE_CHECKING:
    from kdtp.model.comm import Comm


@dataclass(frozen=True)
class Angles:
    """cos and sin of M rows, float32 [M, head_dim / 2]."""

    cos: torch.Tensor
    sin: torch.Tensor


@dataclass(frozen=True)
class View:
    """What blocks of n slots see in a layer: rows int64 [B, N] of the context, the last of them next to the block, and
    of these and the block a mask, bool [B, n, N + n]."""

    rows: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class Attention:
    """GQA with a norm per head, of float32 weights [d]. w_q [H, h * d], w_kv [H, 2 * kv * d] (keys, then values), w_o
    [h * d, H]."""

    head_dim: int
    w_q: torch.Tensor
    w_kv: torch.Tensor
    w_o: torch.Tensor
    q_norm: torch.Tensor
    k_norm: torch.Tensor
    eps: float
    q_bias: torch.Tensor | None
    kv_bias: torch.Tensor | None
    o_bias: torch.Tensor | None
    comm: Comm

    def keys_values(self, x: torch.Tensor, angles: Angles) -> torch.Tensor:
        """What is seen of rows x [M, H]: rotated keys and values, [2, M, kv, d]."""
        kv = self._heads(x, self.w_kv, self.kv_bias)
        return kernels.gqa_prep_kv(kv, self.k_norm, self.eps, angles.cos, angles.sin)

    def __call__(self, x: torch.Tensor, angles: Angles, context: torch.Tensor, view: View) -> torch.Tensor:
        """context [2, rows, kv, d]: keys and values of committed rows, of all sequences -> [B * n, H]."""
        q, kv = self._heads(x, self.w_q, self.q_bias), self._heads(x, self.w_kv, self.kv_bias)
        q, block = kernels.gqa_prep(q, kv, self.q_norm, self.k_norm, self.eps, angles.cos, angles.sin)
        block = block.view(2, len(view.rows), -1, *block.shape[2:])
        heads = _attend(q, torch.cat([context[:, view.rows], block], 2), view.mask)
        out = self.comm.all_reduce(kernels.linear(heads, self.w_o))
        return out if self.o_bias is None else out + self.o_bias

    def _heads(self, x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = kernels.linear(x, w)
        return (y if bias is None else y + bias).view(len(x), -1, self.head_dim)


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

    def dynamic(self, x: torch.Tensor) -> torch.Tensor:
        """What is added to `base`, of slots x [M, H]: [M, 2 * taps * groups]."""
        return kernels.linear(x, self.w_kernel)

    def before(self, x: torch.Tensor, dynamic: torch.Tensor, n: int) -> torch.Tensor:
        """The sublayer's input, of blocks of n slots x [B * n, H]."""
        return kernels.convolve(x, dynamic, self.base, 0, n)

    def behind(self, x: torch.Tensor, dynamic: torch.Tensor, n: int) -> torch.Tensor:
        """What becomes of its output, likewise."""
        return kernels.convolve(x, dynamic, self.base, 1, n)


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
        y, conv = self.attention_norm(x), self.attention_conv
        if conv is None:
            x = x + self.attention(y, angles, context, view)
        else:
            dynamic = conv.dynamic(y)
            x = x + conv.behind(self.attention(conv.before(y, dynamic, n), angles, context, view), dynamic, n)
        y, conv = self.mlp_norm(x), self.mlp_conv
        if conv is None:
            return x + self.comm.all_reduce(self.mlp(y))
        dynamic = conv.dynamic(y)
        return x + conv.behind(self.comm.all_reduce(self.mlp(conv.before(y, dynamic, n))), dynamic, n)


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
        weights.exact(f"{at}self_attn.q_norm.weight"),
        weights.exact(f"{at}self_attn.k_norm.weight"),
        config.rms_norm_eps,
        bias(q),
        bias(k, v),
        bias(o),
        comm,
    )
    mlp = Mlp(matrix("mlp.gate", "mlp.up"), matrix("mlp.down"))
    convolutions = convolution("attention_conv"), convolution("mlp_conv")
    return Layer(norm("input_layernorm"), attention, norm("post_attention_layernorm"), mlp, *convolutions, comm)
