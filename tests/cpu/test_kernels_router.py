"""The router against the reference, ties included."""

import dataclasses

import numpy as np
import pytest
import torch
from compare import assert_close
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cases import MICRO

from kdtp import kernels
from reference import moe

METHODS = [("softmax", "greedy"), ("softmax", "group_limited_greedy"), ("sigmoid", "noaux_tc")]


@st.composite
def routings(draw):
    scoring, method = draw(st.sampled_from(METHODS))
    n_group, size = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    topk_group = draw(st.integers(1, n_group))
    within = size * (n_group if method == "greedy" else topk_group)
    return dataclasses.replace(
        MICRO,
        scoring_func=scoring,
        topk_method=method,
        n_routed_experts=n_group * size,
        n_group=n_group,
        topk_group=topk_group,
        num_experts_per_tok=draw(st.integers(1, within)),
        norm_topk_prob=draw(st.booleans()),
        routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
    )


def rule(config):
    grouped = config.topk_method != "greedy"
    return kernels.Routing(
        config.num_experts_per_tok,
        config.scoring_func,
        config.n_group if grouped else 1,
        config.topk_group if grouped else 1,
        config.norm_topk_prob,
        config.routed_scaling_factor,
    )


def compare(config, logits, bias):
    ids, weights = kernels.router(
        torch.from_numpy(logits), bias if bias is None else torch.from_numpy(bias), rule(config)
    )
    for row in range(len(logits)):
        want_ids, want_weights = moe.route(config, logits[row], bias)
        order = np.argsort(want_ids)
        assert ids[row].tolist() == want_ids[order].tolist()
        assert_close(weights[row], want_weights[order], rtol=4e-6)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(routings(), st.integers(0, 2**32 - 1), st.booleans())
def test_against_the_reference(config, seed, coarse):
    random = np.random.default_rng(seed)
    experts = config.n_routed_experts
    logits, bias = random.normal(size=(4, experts)), random.normal(size=experts) / 4
    if coarse:  # whole numbers: most scores tie
        logits, bias = np.rint(logits), np.rint(bias * 4)
    compare(config, logits.astype(np.float32), bias.astype(np.float32) if config.scoring_func == "sigmoid" else None)


def test_all_equal_takes_the_lowest_ids():
    config = dataclasses.replace(MICRO, n_routed_experts=12, num_experts_per_tok=3)
    ids, _ = kernels.router(torch.zeros(2, 12), None, rule(config))
    assert ids.tolist() == [[0, 1, 2]] * 2


def test_a_masked_group_never_wins_over_negative_scores():
    config = dataclasses.replace(
        MICRO, n_routed_experts=6, num_experts_per_tok=2, scoring_func="sigmoid", topk_method="noaux_tc", n_group=3
    )
    bias = np.full(6, -5, np.float32)
    bias[4:] = -4
    ids, _ = kernels.router(torch.zeros(1, 6), torch.from_numpy(bias), rule(config))
    assert ids.tolist() == [[4, 5]]


def test_a_bias_chooses_and_does_not_weigh():
    config = dataclasses.replace(
        MICRO,
        n_routed_experts=4,
        num_experts_per_tok=1,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
    )
    ids, weights = kernels.router(torch.tensor([[2.0, 0.0, 0, 0]]), torch.tensor([0.0, 0, 0, 1]), rule(config))
    assert ids.tolist() == [[3]]
    assert weights.item() == pytest.approx(0.5)
