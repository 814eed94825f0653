"""Mixture of experts: router, routed experts, shared expert."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from kdtp import kernels
from kdtp.config import ModelConfig
from kdtp.kernels import Routing, cuda
from kdtp.model.batch import Batch
from kdtp.model.beside import Ready, beside
from kdtp.model.layers import Mlp


def routing(config: ModelConfig) -> Routing:
    """How tokens of this model choose experts."""
    grouped = config.topk_method != "greedy"
    return Routing(
        topk=config.num_experts_per_tok,
        scoring_func=config.scoring_func,
        n_group=config.n_group if grouped else 1,
        topk_group=config.topk_group if grouped else 1,
        norm_topk_prob=config.norm_topk_prob,
        scale=config.routed_scaling_factor,
    )


@dataclass(frozen=True)
class Experts:
    """Routed experts, w_gate_up [E, H, 2 * I] (gate, then up), w_down [E, I, H]; I is cut over the ranks."""

    w_gate_up: torch.Tensor
    w_down: torch.Tensor

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, add: torch.Tensor | None, ready: Ready
    ) -> torch.Tensor:
        """As kernels.moe."""
        return kernels.moe(x, ids, weights, self.w_gate_up, self.w_down, add, ready)


@dataclass(frozen=True)
class Int4Experts:
    """Routed experts in the INT4 form of kernels.cuda.moe_int4, on a GPU, in bfloat16; I is cut over the ranks."""

    w_gate_up: torch.Tensor
    s_gate_up: torch.Tensor
    w_down: torch.Tensor
    s_down: torch.Tensor

    @classmethod
    def repacked(
        cls, gate_up: tuple[torch.Tensor, torch.Tensor], down: tuple[torch.Tensor, torch.Tensor]
    ) -> Int4Experts:
        """Of words and scales as published."""
        return cls(*cuda.repack(*gate_up), *cuda.repack(*down))

    def __call__(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, add: torch.Tensor | None, ready: Ready
    ) -> torch.Tensor:
        """As kernels.moe."""
        return cuda.moe_int4(x, ids, weights, self.w_gate_up, self.s_gate_up, self.w_down, self.s_down, add, ready)


def router_matrix(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A router's w, float32 [H, E], in `dtype` where that holds the same values, as it does for published bfloat16
    ones, and the kernels' products are summed in float32 all the same: on a GPU."""
    narrow = w.to(dtype)
    return narrow if w.is_cuda and torch.equal(narrow.float(), w) else w


@dataclass(frozen=True)
class Moe:
    """w_router [H, E] as router_matrix gives it, bias float32 [E] or None.

    Every rank routes for itself, and alike. The shared expert is added unweighted.
    """

    routing: Routing
    w_router: torch.Tensor
    bias: torch.Tensor | None
    experts: Experts | Int4Experts
    shared: Mlp | None

    def __call__(self, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        """x [M', H] -> this rank's partial sum [M', H]; no expert is read for padding."""
        shared, ready = (None, None) if self.shared is None else beside(x, partial(self.shared, x))
        logits = self._logits(x)[: len(batch.rows)]
        ids, weights = kernels.router(logits, self.bias, self.routing, batch.rows if batch.padded else None)
        return self.experts(x, ids, weights, shared, ready)

    def _logits(self, x: torch.Tensor) -> torch.Tensor:
        if self.w_router.dtype == torch.float32:
            return kernels.linear(x.float(), self.w_router)
        return cuda.linear(x, self.w_router, out_f32=True)
