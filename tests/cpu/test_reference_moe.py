"""The routers, by hand."""

import dataclasses

import numpy as np
import pytest
from reference_cases import MICRO, MICRO_V3, random_model

from reference.moe import moe, route, swiglu

SIGMOID = MICRO_V3  # 8 experts in 4 groups of 2, best 2 groups, top 3, normed, factor 2.5
GROUPED = dataclasses.replace(
    MICRO, n_routed_experts=6, n_group=3, topk_group=1, topk_method="group_limited_greedy", routed_scaling_factor=16.0
)


def logit(p):
    """The inverse of sigmoid."""
    return np.float32(np.log(np.asarray(p) / (1 - np.asarray(p))))


def test_softmax_greedy():
    scores = np.float32([0.1, 0.4, 0.2, 0.3])
    experts, weights = route(MICRO, np.log(scores), None)
    assert experts.tolist() == [1, 3]
    np.testing.assert_allclose(weights, [0.4, 0.3], rtol=1e-6)


def test_softmax_scaling_or_norm_never_both():
    scores = np.log(np.float32([0.1, 0.4, 0.2, 0.3]))
    scaled = dataclasses.replace(MICRO, routed_scaling_factor=10.0)
    np.testing.assert_allclose(route(scaled, scores, None)[1], [4.0, 3.0], rtol=1e-6)
    normed = dataclasses.replace(scaled, norm_topk_prob=True)
    np.testing.assert_allclose(route(normed, scores, None)[1], [4 / 7, 3 / 7], rtol=1e-6)
    single = dataclasses.replace(normed, num_experts_per_tok=1)
    np.testing.assert_allclose(route(single, scores, None)[1], [4.0], rtol=1e-6)


def test_group_limited_greedy_scores_a_group_by_its_best():
    # The two best of the middle group are no match for expert 5 alone.
    scores = np.log(np.float32([0.02, 0.03, 0.28, 0.27, 0.08, 0.32]))
    experts, weights = route(GROUPED, scores, None)
    assert experts.tolist() == [5, 4]
    np.testing.assert_allclose(weights, [16 * 0.32, 16 * 0.08], rtol=1e-6)


def test_noaux_scores_a_group_by_its_two_best():
    scores = [0.9, 0.1, 0.6, 0.55, 0.7, 0.2, 0.2, 0.3]
    experts, weights = route(SIGMOID, logit(scores), np.zeros(8, np.float32))
    assert experts.tolist() == [0, 2, 3]  # groups 1 (1.15) and 0 (1.0), not 2 (0.9) for its 0.7
    assert weights.tolist() == pytest.approx([2.5 * s / (0.9 + 0.6 + 0.55) for s in (0.9, 0.6, 0.55)], rel=1e-5)


def test_the_bias_selects_but_does_not_weigh():
    scores, bias = [0.5] * 8, np.zeros(8, np.float32)
    bias[[7, 6, 4]] = [0.3, 0.2, 0.1]
    experts, weights = route(SIGMOID, logit(scores), bias)
    assert experts.tolist() == [7, 6, 4]
    assert weights.tolist() == pytest.approx([2.5 / 3] * 3, rel=1e-6)


def test_masked_experts_lose_to_negative_ones():
    """With biases below zero a masked expert at 0 would win: it must be -inf."""
    bias = np.full(8, -2.0, np.float32)
    bias[[0, 1, 2]] = -1.0
    experts, _ = route(SIGMOID, logit([0.5] * 8), bias)
    assert experts.tolist() == [0, 1, 2]


def test_ties_go_to_the_lowest_id():
    assert route(MICRO, np.zeros(4, np.float32), None)[0].tolist() == [0, 1]
    assert route(SIGMOID, np.zeros(8, np.float32), np.zeros(8, np.float32))[0].tolist() == [0, 1, 2]
    assert route(GROUPED, np.zeros(6, np.float32), None)[0].tolist() == [0, 1]


def test_experts_and_shared_are_added():
    model = random_model(MICRO, 3)
    w, x = model.layer(1), np.random.default_rng(0).normal(size=(4, MICRO.hidden_size)).astype(np.float32)
    got = moe(MICRO, w, x)
    for m in range(4):
        scores = np.exp(x[m].astype(np.float64) @ w["router"])
        scores /= scores.sum()
        want = swiglu(x[m : m + 1], w["shared.w_gate"], w["shared.w_up"], w["shared.w_down"])[0].astype(np.float64)
        for expert in np.argsort(-scores)[:2]:
            gate, up, down = (w[f"experts.{name}"][expert] for name in ("w_gate", "w_up", "w_down"))
            inner = x[m] @ gate
            want += scores[expert] * ((inner / (1 + np.exp(-inner)) * (x[m] @ up)) @ down)
        np.testing.assert_allclose(got[m], want, atol=1e-5)
