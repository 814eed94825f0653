"""RMSNorm."""

from __future__ import annotations

import numpy as np

from reference.arith import tree_sum


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x / sqrt(mean(x^2) + eps) * weight over the last axis: x [M, D], weight [D] -> [M, D]."""
    mean = tree_sum(x * x)[..., None] / np.float32(x.shape[-1])
    return x / np.sqrt(mean + np.float32(eps)) * weight
