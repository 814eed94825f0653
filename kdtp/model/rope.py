"""Angles of the rotary embedding, with YaRN's context extension."""

from __future__ import annotations

import math

import torch

from kdtp.config import ModelConfig, YarnConfig


def tables(
    config: ModelConfig, positions: int, device: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin at positions 0 .. positions - 1 as kernels.mla_prep takes them, made in float64: float32
    [positions, 1, rope] for a CPU (cosines twice, minus the sines then the sines), [positions, rope / 2] for a GPU.

    One table for all forwards: what a position gets cannot depend on its neighbours.
    """
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * inverse_frequencies(config)
    scale = amplitude(config.rope_scaling)
    cos, sin = (angles.cos() * scale).float(), (angles.sin() * scale).float()
    if device is not None and device.type != "cpu":
        return cos.to(device), sin.to(device)
    return torch.cat([cos, cos], 1).unsqueeze(1), torch.cat([-sin, sin], 1).unsqueeze(1)


def softmax_scale(config: ModelConfig) -> float:
    """What attention scores are multiplied by: (nope + rope)^-1/2, times m(factor, mscale_all_dim)^2 with YaRN."""
    scale = float((config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
    yarn = config.rope_scaling
    return scale if yarn is None else scale * _mscale(yarn.factor, yarn.mscale_all_dim) ** 2


def inverse_frequencies(config: ModelConfig) -> torch.Tensor:
    """Radians per position of each pair, float64 [rope / 2]."""
    return frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)


def frequencies(dim: int, theta: float, yarn: YarnConfig | None) -> torch.Tensor:
    """As above, for heads of `dim` rotated dimensions. YaRN: arXiv 2309.00071, as modeling_deepseek_v3."""
    pairs = torch.arange(dim // 2, dtype=torch.float64)
    plain = theta ** (-2 * pairs / dim)
    if yarn is None:
        return plain
    low = max(math.floor(_pair(dim, theta, yarn, yarn.beta_fast)), 0)
    high: float = min(math.ceil(_pair(dim, theta, yarn, yarn.beta_slow)), dim - 1)
    if low == high:
        high += 0.001
    ramp = ((pairs - low) / (high - low)).clamp(0, 1)
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def _pair(dim: int, theta: float, yarn: YarnConfig, rotations: float) -> float:
    """The fractional pair that turns `rotations` times within the original context."""
    return dim * math.log(yarn.original_max_position_embeddings / (2 * math.pi * rotations)) / (2 * math.log(theta))


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0


def amplitude(yarn: YarnConfig | None) -> float:
    """What cos and sin are multiplied by; 1 for every published target."""
    return 1.0 if yarn is None else _mscale(yarn.factor, yarn.mscale) / _mscale(yarn.factor, yarn.mscale_all_dim)
