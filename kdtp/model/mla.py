"""Multi-head latent attention of one layer, for this rank's heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kdtp import kernels
from kdtp.config import ModelConfig
from kdtp.model.batch import Batch
from kdtp.model.layers import Norm
from kdtp.model.rope import softmax_scale


@dataclass(frozen=True)
class Query:
    """The second half of a low-rank query: norm of the q_lora part, then w_b [q_lora, h * (nope + rope)]."""

    norm: Norm
    w_b: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[M, q_lora] -> [M, h * (nope + rope)]."""
        return kernels.linear(self.norm(x), self.w_b)


@dataclass(frozen=True)
class Mla:
    """Attention in absorb form: w_kc moves to the query, w_vc behind the weighted sum, and only latents are cached.

    w_in [H, q + kv_row]: the query (or its q_lora part, when there is a `query`) and the new KV row in one product;
    w_kc [h, nope, kv_lora], w_vc [h, kv_lora, v], w_o [h * v, H] for the h heads of this rank.
    """

    config: ModelConfig
    w_in: torch.Tensor
    query: Query | None
    latent_norm: Norm
    w_kc: torch.Tensor
    w_vc: torch.Tensor
    w_o: torch.Tensor

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor) -> torch.Tensor:
        """Write the KV rows of x [M', H] into kv [N, kv_row], attend -> this rank's partial sum [M', H]."""
        nope, lora = self.config.qk_nope_head_dim, self.config.kv_lora_rank
        q, kv_new = self._project(x)
        norm = self.latent_norm
        absorbed = kernels.mla_prep(q, kv_new, norm.weight, norm.eps, batch.cos, batch.sin, batch.rows, kv)
        kernels.linear_heads(q[..., :nope], self.w_kc, absorbed[..., :lora])
        latents = kernels.mla_tree(absorbed, kv, batch.keys, softmax_scale(self.config), lora)
        return kernels.linear(kernels.linear_heads(latents, self.w_vc).flatten(1), self.w_o)

    def _project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries [M', h, nope + rope], and KV rows before norm and rotation [M', kv_lora + rope]."""
        q, kv_new = torch.tensor_split(kernels.linear(x, self.w_in), [-self.config.kv_row], 1)
        if self.query is not None:
            q = self.query(q)
        return q.view(x.shape[0], self.w_kc.shape[0], -1), kv_new
