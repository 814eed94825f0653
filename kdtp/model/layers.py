"""The parts of a layer that know nothing of attention, caches or ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kdtp import kernels


@dataclass(frozen=True)
class Norm:
    """RMS norm: weight float32 [H]."""

    weight: torch.Tensor
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, H]."""
        return kernels.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The new residual x + residual, and its norm."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps)


@dataclass(frozen=True)
class Mlp:
    """SwiGLU MLP: w_gate_up [H, 2 * I] (gate, then up), w_down [I, H]; with I cut, the result is a partial sum."""

    w_gate_up: torch.Tensor
    w_down: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[M, H] -> [M, H]."""
        return kernels.linear(kernels.silu_mul(kernels.linear(x, self.w_gate_up)), self.w_down)
