"""What every GPU test needs; where it is missing, each test is skipped by its name and says what is missing."""

from __future__ import annotations

import pytest
import torch

from kdtp.kernels.abi import LIBRARY


@pytest.fixture(autouse=True)
def cuda(request: pytest.FixtureRequest) -> torch.device:
    """The GPU that tests run on."""
    if not torch.cuda.is_available():
        pytest.skip(f"{request.node.name}: no CUDA device")
    if not LIBRARY.is_file():
        pytest.skip(f"{request.node.name}: the CUDA kernels are not built: run `kdtp build-kernels`")
    return torch.device("cuda")
