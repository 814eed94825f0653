"""What every test on several GPUs needs; where it is missing, each is skipped by its name and says what is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kdtp.config import ConfigError, EngineConfig
from kdtp.engine.plan import plan
from tests.gpu.conftest import missing

os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}  # no NVLink multicast
DEVICE = "cuda"


@pytest.fixture(scope="session", params=[2, 4, 8])
def gpus(request: pytest.FixtureRequest) -> int:
    """How many GPUs a test takes."""
    if reason := missing():
        pytest.skip(f"{request.param} GPUs: {reason}")
    if torch.cuda.device_count() < request.param:
        pytest.skip(f"{request.param} GPUs: this machine has {torch.cuda.device_count()}")
    return int(request.param)


def need_legal(model: Path, tp: int, dtype: str = "float32") -> None:
    """Skip a test of a model that so many ranks cannot share."""
    try:
        plan(EngineConfig(str(model), tp, DEVICE, dtype))
    except ConfigError as error:
        pytest.skip(str(error))
