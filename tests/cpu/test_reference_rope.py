"""RoPE and YaRN against their definitions and against the numbers of published models."""

import dataclasses

import numpy as np
import pytest
from reference_cases import MICRO

from reference.config import ModelConfig, YarnConfig
from reference.rope import amplitude, inverse_frequencies, rotate, softmax_scale, yarn_ramp

KIMI = dataclasses.replace(MICRO, qk_nope_head_dim=128, qk_rope_head_dim=64, rope_theta=50000.0)


def with_yarn(config: ModelConfig, factor: float, weight: float) -> ModelConfig:
    return dataclasses.replace(config, rope_scaling=YarnConfig(factor, 4096, mscale=weight, mscale_all_dim=weight))


def test_rotation_is_a_complex_product():
    random = np.random.default_rng(0)
    x, positions = random.normal(size=(5, 3, 64)).astype(np.float32), [0, 1, 7, 7, 100_000]
    turn = np.exp(1j * np.multiply.outer(positions, 50000.0 ** (-np.arange(32) / 32)))[:, None]
    want = (x[..., :32] + 1j * x[..., 32:]) * turn
    got = rotate(KIMI, x, positions)
    np.testing.assert_allclose(got, np.concatenate([want.real, want.imag], -1), atol=2e-6)
    assert rotate(KIMI, x[:1], [0]).tobytes() == x[:1].tobytes()


def test_scores_depend_on_distance_only():
    q, k = np.random.default_rng(1).normal(size=(2, 1, 64)).astype(np.float32)
    scores = [(rotate(KIMI, q, [at + 9]) @ rotate(KIMI, k, [at]).T).item() for at in (0, 1, 500, 200_000)]
    np.testing.assert_allclose(scores, scores[0], atol=1e-5)


@pytest.mark.parametrize(("beta_fast", "low", "high"), [(1.0, 19, 20), (32.0, 8, 20)])
def test_yarn_ramp_of_kimi(beta_fast, low, high):
    """K2 (beta_fast 1) steps between pairs 19 and 20, K2.5 (32) ramps from pair 8 to 20."""
    ramp = yarn_ramp(64, 50000.0, YarnConfig(64.0, 4096, beta_fast=beta_fast))
    np.testing.assert_allclose(ramp, np.interp(np.arange(32), [low, high], [0, 1]))


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    plain, scaled = inverse_frequencies(KIMI), inverse_frequencies(with_yarn(KIMI, 64.0, 1.0))
    assert (scaled[:9] == plain[:9]).all()
    np.testing.assert_allclose(scaled[20:], plain[20:] / 64)
    assert (np.diff(scaled) < 0).all()


@pytest.mark.parametrize(("factor", "weight", "square"), [(40, 0.707, 1.5896), (40, 1.0, 1.8739), (64, 1.0, 2.0047)])
def test_softmax_scale_of_published_models(factor, weight, square):
    """V2-Lite, V3, K2."""
    config = with_yarn(KIMI, factor, weight)
    assert softmax_scale(KIMI) == 192**-0.5
    assert softmax_scale(config) == pytest.approx(192**-0.5 * square, rel=1e-4)
    assert amplitude(config) == 1.0


def test_amplitude_where_the_two_weights_differ():
    config = dataclasses.replace(KIMI, rope_scaling=YarnConfig(40.0, 4096, mscale=1.0, mscale_all_dim=0.0))
    assert amplitude(config) == pytest.approx(1.36889, rel=1e-5)
    assert softmax_scale(config) == 192**-0.5
    x = np.ones((1, 64), np.float32)
    assert np.linalg.norm(rotate(config, x, [3])) == pytest.approx(8 * 1.36889, rel=1e-5)
