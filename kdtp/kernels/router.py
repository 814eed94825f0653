"""Choice of experts: softmax (DeepSeek-V2) and sigmoid with a correction bias (DeepSeek-V3, Kimi)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kdtp.kernels import cuda
from kdtp.kernels.check import FLOAT32, check


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts; names as in config.json.

    scoring_func "softmax" or "sigmoid"; n_group > 1 keeps the best topk_group groups first (a group counts by its
    best score, or with a bias by the sum of its two best); scale: routed_scaling_factor.
    """

    topk: int
    scoring_func: str
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    scale: float


def router(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing, kv_rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts of each row, in ascending id, and their weights. Among equal scores the lowest id wins.

    logits float32 [M, E]; bias float32 [E], only with "sigmoid": it chooses, and does not weigh; kv_rows int64 [M]: a
    row with a negative one is padding, whose ids are -1 -> ids int64 [M, topk], weights float32 [M, topk]. Raises as
    kernels.check.
    Source: modeling_deepseek_v2 / v3 (MoEGate).
    """
    if logits.is_cuda:
        return cuda.router(logits, bias, routing, kv_rows)
    check("router", "logits", logits, FLOAT32, None, None)
    if bias is not None:
        check("router", "bias", bias, FLOAT32, logits.shape[1])
    scores = _scores(logits, routing.scoring_func)
    ids = _first_best(_candidates(scores, bias, routing), routing.topk).sort(-1).values
    weights = scores.gather(1, ids)
    if kv_rows is not None:
        ids = ids.masked_fill((kv_rows < 0).unsqueeze(1), -1)
    if routing.norm_topk_prob and (bias is not None or routing.topk > 1):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if bias is None:  # V2 either normalises or scales
            return ids, weights
    return ids, weights * routing.scale


def _scores(logits: torch.Tensor, scoring_func: str) -> torch.Tensor:
    if scoring_func == "softmax":
        return logits.softmax(-1)
    assert scoring_func == "sigmoid", scoring_func
    return logits.double().sigmoid().float()  # float64: as in silu_mul


def _candidates(scores: torch.Tensor, bias: torch.Tensor | None, routing: Routing) -> torch.Tensor:
    """What is ranked: scores (and bias), experts outside the best groups masked."""
    ranked = scores if bias is None else scores + bias
    if routing.n_group == 1:
        return ranked
    groups = ranked.view(len(ranked), routing.n_group, -1)
    value = groups.amax(-1) if bias is None else groups.topk(2, -1).values.sum(-1)
    kept = torch.zeros_like(value, dtype=torch.bool).scatter_(1, _first_best(value, routing.topk_group), True)
    # Not 0, as early releases of the model code have it: that could win over a negative biased score.
    return groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def _first_best(x: torch.Tensor, k: int) -> torch.Tensor:
    # topk leaves open which of several equal values it takes.
    return x.sort(stable=True, dim=-1, descending=True).indices[:, :k]
