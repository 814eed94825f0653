"""Arguments of the kernels that only a drafter needs, for kernel_cases.py: one TP=8 rank's shapes of a DFlash 2 drafter
as wide as Kimi K2.6, M slots of one block."""

from __future__ import annotations

from typing import Any

import torch

from scripts.k26 import EPS, HEADS, HIDDEN, Tensors

KV_HEADS, HEAD_DIM = 1, 128
TAPS, GROUP = 2, 16  # of the convolution; channels that a group has


def gqa_prep(tensors: Tensors, m: int) -> dict[str, Any]:
    """A layer's queries, keys and values."""
    q, kv = tensors.normal(m, HEADS, HEAD_DIM), tensors.normal(m, 2 * KV_HEADS, HEAD_DIM)
    angles = {name: tensors.normal(m, HEAD_DIM // 2, dtype=torch.float32) for name in ("cos", "sin")}
    weights = {"q_weight": tensors.norm(HEAD_DIM), "k_weight": tensors.norm(HEAD_DIM)}
    made = {"q_out": torch.empty_like(q), "kv_out": torch.empty_like(kv)}
    sizes = {"rows": m, "heads": HEADS, "kv_heads": KV_HEADS, "width": HEAD_DIM, "eps": EPS, "dtype": 1}
    return {"q": q, "kv": kv} | angles | weights | made | sizes


def convolve(tensors: Tensors, m: int) -> dict[str, Any]:
    """One side of a sublayer."""
    groups = HIDDEN // GROUP
    x, dynamic = tensors.normal(m, HIDDEN), tensors.normal(m, 2 * TAPS * groups)
    sizes = {"rows": m, "width": HIDDEN, "taps": TAPS, "groups": groups, "side": 0, "n": m, "dtype": 1}
    return {"x": x, "dynamic": dynamic, "base": tensors.normal(2, TAPS, HIDDEN), "out": torch.empty_like(x)} | sizes
