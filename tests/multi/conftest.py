"""What every test on several GPUs needs; where it is missing, each is skipped by its name and says what is missing."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kdtp.config import EngineConfig
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


def need_legal(model: Path, tp: int) -> None:
    """Skip a test of a model that so many ranks cannot share."""
    legal = plan(EngineConfig(str(model))).model.legal_tp()
    if tp not in legal:
        pytest.skip(f"{model.name} can be split over {legal} ranks, not over {tp}")
