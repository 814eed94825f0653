"""What every GPU test needs; where it is missing, each test is skipped by its name and says what is missing."""

from __future__ import annotations

import pytest
import torch

from kdtp.kernels.abi import LIBRARY


def missing() -> str | None:
    """What a GPU test lacks here, or None."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if not LIBRARY.is_file():
        return "the CUDA kernels are not built: run `kdtp build-kernels`"
    return None


@pytest.fixture(autouse=True)
def cuda(request: pytest.FixtureRequest) -> torch.device:
    """The GPU that tests run on."""
    if reason := missing():
        pytest.skip(f"{request.node.name}: {reason}")
    return torch.device("cuda")
