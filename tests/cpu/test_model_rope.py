"""Angles and scale against the reference, YaRN included."""

import dataclasses

import numpy as np
import pytest
import torch
from compare import assert_close
from reference_cases import MICRO

from kdtp import kernels
from kdtp.config import ModelConfig
from kdtp.model import rope
from reference import rope as reference
from reference.config import YarnConfig, to_metadata

YARNS = [
    None,
    YarnConfig(4.0, 64, mscale_all_dim=1.0),
    YarnConfig(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
    YarnConfig(32.0, 4096, beta_fast=1.0, beta_slow=1.0, mscale=0.7, mscale_all_dim=0.3),
]


@pytest.mark.parametrize("yarn", YARNS)
@pytest.mark.parametrize("dim", [4, 64])
def test_rotation_and_scale(dim, yarn):
    config = dataclasses.replace(MICRO, qk_rope_head_dim=dim, rope_theta=50000.0, rope_scaling=yarn)
    ours = ModelConfig.from_metadata(to_metadata(config), "test")
    positions = [0, 1, 63, 64, 999, 4095, 5000]
    x = np.random.default_rng(0).normal(size=(len(positions), 3, dim)).astype(np.float32)
    cos, sin = rope.tables(ours, 5001)
    found = kernels.rope(torch.from_numpy(x), cos[positions], sin[positions])
    assert_close(found, reference.rotate(config, x, positions), atol=1e-6)
    assert rope.softmax_scale(ours) == pytest.approx(reference.softmax_scale(config), rel=1e-12)
