"""Multi-head latent attention: one KV row per token, shared by all heads.

A head's key is w_kc[head] @ latent beside the shared rope part, its value latent @ w_vc[head]. The absorbed form moves
w_kc to the query and w_vc behind the weighted sum, so only latents are read; `attend_naive` makes keys and values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from reference.arith import linear, softmax, tree_sum, vecmat
from reference.config import ModelConfig
from reference.norm import rms_norm
from reference.rope import rotate, softmax_scale

Weights = Mapping[str, np.ndarray]


def queries(config: ModelConfig, w: Weights, x: np.ndarray, positions: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Per-head queries of x [M, H]: the part without position [M, h, nope] and the rotated part [M, h, rope]."""
    if config.q_lora_rank == 0:
        q = linear(x, w["w_q"])
    else:
        q = linear(rms_norm(linear(x, w["w_q_a"]), w["q_a_norm"], config.rms_norm_eps), w["w_q_b"])
    q = q.reshape(len(x), config.num_attention_heads, -1)
    nope, rope = np.split(q, [config.qk_nope_head_dim], axis=-1)
    return nope, rotate(config, rope, positions)


def kv_rows(config: ModelConfig, w: Weights, x: np.ndarray, positions: Sequence[int]) -> np.ndarray:
    """What the cache keeps of x [M, H]: the normed latent, then the rotated part, [M, kv_lora + rope]."""
    latent, rope = np.split(linear(x, w["w_kv_a"]), [config.kv_lora_rank], axis=-1)
    return np.concatenate([rms_norm(latent, w["kv_a_norm"], config.rms_norm_eps), rotate(config, rope, positions)], -1)


def attend(
    config: ModelConfig, w: Weights, q_nope: np.ndarray, q_rope: np.ndarray, rows: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """Absorbed attention of M queries over rows [N, kv_row] under mask bool [M, N] -> [M, h, v].

    Rows that a query may not see are not read at all: they may hold anything, NaN included.
    """
    scale = np.float32(softmax_scale(config))
    out = []
    for nope, rope, visible in zip(q_nope, q_rope, mask, strict=True):
        seen = rows[visible]
        query = np.concatenate([vecmat(nope, w["w_kc"]), rope], axis=-1)  # [h, kv_row]
        probs = softmax(vecmat(query, np.ascontiguousarray(seen.T)) * scale)  # [h, N]
        context = vecmat(probs, seen[:, : config.kv_lora_rank])  # [h, kv_lora]
        out.append(vecmat(context, w["w_vc"]))
    return np.stack(out)


def attend_naive(
    config: ModelConfig, w: Weights, q_nope: np.ndarray, q_rope: np.ndarray, rows: np.ndarray, mask: np.ndarray
) -> np.ndarray:
    """The same with every head's keys and values materialised: the definition that `attend` must equal."""
    scale = np.float32(softmax_scale(config))
    out = np.empty((len(q_nope), config.num_attention_heads, config.v_head_dim), np.float32)
    for m, visible in enumerate(mask):
        latent, rope = np.split(rows[visible], [config.kv_lora_rank], axis=-1)
        for head in range(config.num_attention_heads):
            keys = np.concatenate([linear(latent, w["w_kc"][head].T), rope], axis=-1)
            values = linear(latent, w["w_vc"][head])
            query = np.concatenate([q_nope[m, head], q_rope[m, head]])
            probs = softmax(tree_sum(keys * query) * scale)
            out[m, head] = vecmat(probs, values)
    return out
