"""What every test on several GPUs needs; where it is missing, each is skipped by its name and says what is missing."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.conftest import missing


@pytest.fixture(scope="session", params=[2, 4, 8])
def gpus(request: pytest.FixtureRequest) -> int:
    """How many GPUs a test takes."""
    if reason := missing():
        pytest.skip(f"{request.param} GPUs: {reason}")
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"{request.param} GPUs: this machine has {torch.cuda.device_count()}")
    return int(request.param)
