"""Rotary position embedding in NeoX order (pair j is dims j and j + rope / 2), with YaRN as DeepSeek models use it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from reference.config import ModelConfig, YarnConfig


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """Radians per position of each pair, float64 [rope / 2]."""
    dim, theta, yarn = config.qk_rope_head_dim, config.rope_theta, config.rope_scaling
    frequencies = np.array([theta ** (-2 * j / dim) for j in range(dim // 2)])
    if yarn is None:
        return frequencies
    ramp = yarn_ramp(dim, theta, yarn)
    return frequencies / yarn.factor * ramp + frequencies * (1 - ramp)


def yarn_ramp(dim: int, theta: float, yarn: YarnConfig) -> np.ndarray:
    """Share of interpolation per pair, float64 [dim / 2]: 0 for fast pairs (kept), 1 for slow ones (divided)."""

    def pair_with(rotations: float) -> float:
        # The (fractional) pair that turns so many times within the original context.
        return dim * math.log(yarn.original_max_position_embeddings / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = max(math.floor(pair_with(yarn.beta_fast)), 0)
    high: float = min(math.ceil(pair_with(yarn.beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    return np.clip((np.arange(dim // 2) - low) / (high - low), 0, 1)


def mscale(factor: float, weight: float) -> float:
    """m(s, a) = 0.1 a ln s + 1."""
    return 0.1 * weight * math.log(factor) + 1.0


def amplitude(config: ModelConfig) -> float:
    """What cos and sin are multiplied by."""
    yarn = config.rope_scaling
    return 1.0 if yarn is None else mscale(yarn.factor, yarn.mscale) / mscale(yarn.factor, yarn.mscale_all_dim)


def softmax_scale(config: ModelConfig) -> float:
    """What attention scores are multiplied by: (nope + rope)^-1/2, times m(factor, mscale_all_dim)^2 with YaRN."""
    scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    yarn = config.rope_scaling
    return scale if yarn is None else scale * mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def rotate(config: ModelConfig, x: np.ndarray, positions: Sequence[int]) -> np.ndarray:
    """Rotate x [M, ..., rope] by its positions [M]; angles in float64."""
    angles = np.asarray(positions, np.float64)[:, None] * inverse_frequencies(config)
    angles = angles.reshape(len(x), *[1] * (x.ndim - 2), -1)
    cos = (np.cos(angles) * amplitude(config)).astype(np.float32)
    sin = (np.sin(angles) * amplitude(config)).astype(np.float32)
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
