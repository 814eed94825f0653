"""Attention: the absorbed form is the naive one, and what is masked is not read."""

import numpy as np
import pytest
from reference_cases import MICRO, MICRO_V3, random_model

from reference import mla


def case(config, seed):
    """Weights of a layer, queries and rows of 7 tokens at odd positions, and a random mask."""
    model, random = random_model(config, seed), np.random.default_rng(seed)
    w, x = model.layer(0), random.normal(size=(7, config.hidden_size)).astype(np.float32)
    positions = random.integers(0, config.max_position_embeddings, 7)
    mask = random.random((7, 7)) < 0.5
    np.fill_diagonal(mask, True)
    return w, *mla.queries(config, w, x, positions), mla.kv_rows(config, w, x, positions), mask


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("config", [MICRO, MICRO_V3], ids=["plain", "v3"])
def test_absorbed_is_naive(config, seed):
    w, q_nope, q_rope, rows, mask = case(config, seed)
    got = mla.attend(config, w, q_nope, q_rope, rows, mask)
    np.testing.assert_allclose(got, mla.attend_naive(config, w, q_nope, q_rope, rows, mask), atol=2e-6)


def test_masked_rows_may_hold_anything():
    w, q_nope, q_rope, rows, mask = case(MICRO_V3, 0)
    want = mla.attend(MICRO_V3, w, q_nope, q_rope, rows, mask)
    for m in range(7):
        poisoned = np.where(mask[m][:, None], rows, np.float32(np.nan))
        got = mla.attend(MICRO_V3, w, q_nope[m : m + 1], q_rope[m : m + 1], poisoned, mask[m : m + 1])
        assert got[0].tobytes() == want[m].tobytes()


def test_a_row_is_latent_then_rope():
    """The latent part is normed and has no position; only the rope part moves."""
    w, x = random_model(MICRO, 0).layer(0), np.ones((2, MICRO.hidden_size), np.float32)
    here, there = mla.kv_rows(MICRO, w, x, [0, 9])
    assert (here[: MICRO.kv_lora_rank] == there[: MICRO.kv_lora_rank]).all()
    assert (here[MICRO.kv_lora_rank :] != there[MICRO.kv_lora_rank :]).all()
    latent = here[: MICRO.kv_lora_rank] / w["kv_a_norm"]
    assert np.mean(latent**2) == pytest.approx(1, rel=1e-5)
