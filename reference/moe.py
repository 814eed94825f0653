"""SwiGLU MLP, router and mixture of experts: DeepSeek-V2 (softmax) and V3 (sigmoid, noaux_tc) routing."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from reference.arith import linear, sigmoid, silu, softmax, tree_sum, vecmat
from reference.config import ModelConfig

Weights = Mapping[str, np.ndarray]


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    """(silu(x @ gate) * (x @ up)) @ down: x [M, H], gate and up [H, I], down [I, H] -> [M, H]."""
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def largest(values: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest, largest first, the lower index first among equals."""
    return np.argsort(-values, kind="stable")[:k]


def eligible(config: ModelConfig, choice: np.ndarray) -> np.ndarray:
    """`choice` [E] with the experts outside the best `topk_group` groups at -inf.

    A group's score is its largest value (group_limited_greedy) or the sum of its two largest (noaux_tc).
    """
    if config.topk_method == "greedy" or config.n_group == 1:
        return choice
    groups = choice.reshape(config.n_group, -1)
    ordered = -np.sort(-groups, axis=-1)
    scores = ordered[:, 0] if config.topk_method == "group_limited_greedy" else ordered[:, 0] + ordered[:, 1]
    masked = np.full_like(groups, -np.inf)
    for group in largest(scores, config.topk_group):
        masked[group] = groups[group]
    return masked.reshape(-1)


def route(config: ModelConfig, logits: np.ndarray, bias: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The experts of one token and their weights: logits [E], bias [E] (sigmoid only) -> ids [k], weights [k]."""
    if config.scoring_func == "softmax":
        scores = choice = softmax(logits)
    else:
        scores = sigmoid(logits)
        choice = scores + bias  # the bias only selects; the weights are the scores without it
    experts = largest(eligible(config, choice), config.num_experts_per_tok)
    weights = scores[experts]
    normed = config.norm_topk_prob and (config.scoring_func == "sigmoid" or len(experts) > 1)
    if normed:
        weights = weights / (tree_sum(weights.copy()) + np.float32(1e-20))
    if config.scoring_func == "sigmoid" or not normed:
        weights = weights * np.float32(config.routed_scaling_factor)
    return experts, weights


def moe(config: ModelConfig, w: Weights, x: np.ndarray) -> np.ndarray:
    """Each token's experts by weight, plus the shared expert unweighted: x [M, H] -> [M, H]."""
    out = np.zeros_like(x)
    for m, token in enumerate(x):
        experts, weights = route(config, vecmat(token, w["router"]), w.get("router_bias"))
        for expert, weight in zip(experts, weights, strict=True):
            gate, up, down = (w[f"experts.{name}"][expert] for name in ("w_gate", "w_up", "w_down"))
            out[m] += weight * swiglu(token[None], gate, up, down)[0]
    if config.n_shared_experts:
        out += swiglu(x, w["shared.w_gate"], w["shared.w_up"], w["shared.w_down"])
    return out
