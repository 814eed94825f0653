"""DFlash, a block-diffusion drafter (arXiv 2602.06036), version 1 and 2, drafting one block from scratch.

The drafter sees the target's residual stream at a few layers, for committed tokens only. These features, fused into
one vector per token, give keys and values to every layer ("KV injection"); the block [newest token, mask, mask, ...]
gives the queries and keys and values of its own. Slot j of the block predicts the token at its own position.
Parameters have their published names and shapes: y = x @ W.T with W [out, in].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from reference.config import YarnConfig
from reference.norm import rms_norm
from reference.rope import yarn_ramp
from reference.tree import Conditionals, Marginals, marginals

Weights = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class DFlashConfig:
    """Names as in the published config.json.

    windows, causal: per layer, the sliding window (0: none) and whether a slot sees earlier ones only. rope_amplitude:
    what cos and sin are multiplied by. conv_kernel_size 0: no convolution; selector_rank 0: no selector (version 1).
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    windows: tuple[int, ...]
    causal: tuple[bool, ...]
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: YarnConfig | None = None
    rope_amplitude: float = 1.0
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float = 0.0
    conv_kernel_size: int = 0
    conv_group_size: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0


@dataclass(frozen=True)
class DFlash:
    """A drafter, with its target's embedding [V, H] and head [H, V]."""

    config: DFlashConfig
    weights: Weights
    embed: np.ndarray
    head: np.ndarray

    def marginals(self, features: np.ndarray, root: int, k: int) -> Marginals:
        """Version 1: the k best tokens of each depth, for features [N, taps * H] of the N committed tokens."""
        return marginals(self.logits(self.hidden(features, root)[1:]), k)

    def conditionals(self, features: np.ndarray, root: int) -> Conditionals:
        """Version 2: the best tokens of each depth, scored given each of those before it."""
        c, w, hidden = self.config, self.weights, self.hidden(features, root)[1:]
        logits = self.logits(hidden)
        ids = np.argsort(-logits, axis=-1, kind="stable")[:, : c.selector_top_k]
        gates = hidden @ w["candidate_selector.hidden_projection.weight"].T  # [L, rank]
        lp = np.full((*ids.shape, ids.shape[1]), -np.inf, np.float32)
        for d in range(len(ids)):
            before = [root] if d == 0 else ids[d - 1]
            for p, token in enumerate(before):
                gate = w["candidate_selector.predecessor_codebook"][token] * gates[d]
                score = logits[d, ids[d]] + w["candidate_selector.successor_codebook"][ids[d]] @ gate
                lp[d, p] = log_softmax(score)
        return Conditionals(lp, ids)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """Of normed hidden [M, H], over the vocabulary: [M, V]."""
        logits, cap = (
            hidden @ self.head * np.float32(self.config.output_multiplier),
            self.config.final_logit_softcapping,
        )
        return np.float32(cap) * np.tanh(logits / np.float32(cap)) if cap else logits

    def hidden(self, features: np.ndarray, root: int) -> np.ndarray:
        """The block's last hidden states, normed, [block, H]."""
        c, w = self.config, self.weights
        context = rms_norm(features @ w["fc.weight"].T, w["hidden_norm.weight"], c.rms_norm_eps)
        tokens = [root] + [c.mask_token_id] * (c.block_size - 1)
        x = self.embed[tokens] * np.float32(c.input_embedding_scale)
        for i in range(len(c.windows)):
            prefix = f"layers.{i}."
            layer = {name.removeprefix(prefix): v for name, v in w.items() if name.startswith(prefix)}
            x = self.sublayer(layer, "attention", x, lambda y, i=i, layer=layer: self.attention(i, layer, y, context))
            x = self.sublayer(layer, "mlp", x, lambda y, layer=layer: mlp(layer, y))
        return rms_norm(x, w["norm.weight"], c.rms_norm_eps)

    def sublayer(self, w: Weights, kind: str, x, inner) -> np.ndarray:
        """x + inner(norm(x)), with the convolution around `inner` in version 2."""
        norm = {"attention": "input_layernorm", "mlp": "post_attention_layernorm"}[kind]
        y = rms_norm(x, w[f"{norm}.weight"], self.config.rms_norm_eps)
        if not self.config.conv_kernel_size:
            return x + inner(y)
        base = w[f"{kind}_conv.base_kernel"]  # [2, taps, H]
        dynamic = (y @ w[f"{kind}_conv.kernel_projection.weight"].T).reshape(len(y), 2, base.shape[1], -1)
        kernels = base + np.repeat(dynamic, self.config.conv_group_size, axis=-1)  # [M, 2, taps, H]
        return x + convolve(inner(convolve(y, kernels[:, 0])), kernels[:, 1])

    def attention(self, i: int, w: Weights, x: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Of the block x [M, H] over context [N, H] and block: the context is at positions 0 .. N - 1."""
        c, start = self.config, len(context)
        rows = np.concatenate([context, x])
        at = np.arange(len(rows))
        q = self.rotate(self.normed(self.heads(w, "q", x), w["self_attn.q_norm.weight"]), at[start:])
        k = self.rotate(self.normed(self.heads(w, "k", rows), w["self_attn.k_norm.weight"]), at)
        v = self.heads(w, "v", rows)
        out = np.empty_like(q)
        for slot in range(len(x)):
            seen = self.visible(i, start, start + slot, at)
            for head in range(c.num_attention_heads):
                kv = head // (c.num_attention_heads // c.num_key_value_heads)
                scores = k[seen, kv] @ q[slot, head] * np.float32(c.head_dim**-0.5)
                out[slot, head] = np.exp(log_softmax(scores)) @ v[seen, kv]
        return linear(w, "self_attn.o_proj", out.reshape(len(x), -1))

    def visible(self, i: int, start: int, query: int, keys: np.ndarray) -> np.ndarray:
        """Which positions a slot's position sees in layer i: windows reach to both sides where slots may look ahead."""
        seen = np.ones(len(keys), bool)
        if self.config.causal[i]:
            seen &= keys <= query
        if self.config.windows[i]:
            seen &= np.abs(query - keys) < self.config.windows[i]
        return seen

    def heads(self, w: Weights, kind: str, x: np.ndarray) -> np.ndarray:
        """[M, heads, head_dim]."""
        return linear(w, f"self_attn.{kind}_proj", x).reshape(len(x), -1, self.config.head_dim)

    def normed(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """RMS norm of each head."""
        return rms_norm(x, weight, self.config.rms_norm_eps)

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """x [M, heads, head_dim] in NeoX order: pair j is dims j and j + head_dim / 2."""
        angles = positions.astype(np.float64)[:, None, None] * frequencies(self.config)
        cos = (np.cos(angles) * self.config.rope_amplitude).astype(np.float32)
        sin = (np.sin(angles) * self.config.rope_amplitude).astype(np.float32)
        first, second = np.split(x, 2, axis=-1)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def frequencies(c: DFlashConfig) -> np.ndarray:
    """Radians per position of each pair, float64 [head_dim / 2]."""
    plain = np.array([c.rope_theta ** (-2 * j / c.head_dim) for j in range(c.head_dim // 2)])
    if c.rope_scaling is None:
        return plain
    ramp = yarn_ramp(c.head_dim, c.rope_theta, c.rope_scaling)
    return plain / c.rope_scaling.factor * ramp + plain * (1 - ramp)


def linear(w: Weights, name: str, x: np.ndarray) -> np.ndarray:
    """x @ W.T, and the bias if there is one."""
    y = x @ w[f"{name}.weight"].T
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def mlp(w: Weights, x: np.ndarray) -> np.ndarray:
    """SwiGLU."""
    gate = linear(w, "mlp.gate_proj", x)
    return linear(w, "mlp.down_proj", gate / (1 + np.exp(-gate)) * linear(w, "mlp.up_proj", x))


def convolve(x: np.ndarray, kernels: np.ndarray) -> np.ndarray:
    """Causal, with the kernels [M, taps, H] of each slot: tap t multiplies the slot t places before it."""
    out = np.zeros_like(x)
    for slot in range(len(x)):
        for tap in range(min(kernels.shape[1], slot + 1)):
            out[slot] += kernels[slot, tap] * x[slot - tap]
    return out


def log_softmax(x: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))
