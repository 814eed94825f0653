"""Between the projections and the attention: rotation, the latent's norm, the new KV rows."""

from __future__ import annotations

import torch

from kdtp.kernels import cuda
from kdtp.kernels.cache import kv_write
from kdtp.kernels.norm import rms_norm
from kdtp.kernels.rope import rope


def mla_prep(
    q: torch.Tensor,
    kv_new: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_rows: torch.Tensor,
    kv: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and key, norm the latent, write the new KV rows into kv.

    q [M', h, nope + rope], kv_new [M', lora + rope] before norm (weight float32 [lora]) and rotation, kv [N, lora +
    rope], one dtype. cos, sin: each row's, as kernels.rope takes them (CPU), or float32 [M', rope / 2] (GPU). kv_rows
    int64: the cache row of the first M rows (CPU), or of all M', negative for padding (GPU)
    -> [M', h, lora + rope], of which the rope part is set: the query for mla_tree once its first part is absorbed.
    """
    if q.is_cuda:
        return cuda.mla_prep(q, kv_new, weight, eps, cos, sin, kv_rows, kv)
    lora = weight.shape[0]
    nope = q.shape[2] - (kv_new.shape[1] - lora)
    # One rotation for all: the key's rope part is one more head.
    turned = rope(torch.cat([q[..., nope:], kv_new[:, lora:].unsqueeze(1)], 1), cos, sin)
    new = torch.cat([rms_norm(kv_new[:, :lora], weight, eps), turned[:, -1]], 1)
    kv_write(kv, kv_rows, new[: len(kv_rows)])
    absorbed = q.new_empty(*q.shape[:2], kv_new.shape[1])
    absorbed[..., lora:] = turned[:, :-1]
    return absorbed
