"""What every test on several GPUs needs; where it is missing, each is skipped by its name and says what is missing.

This process makes no CUDA call, and tests marked `apart(seconds)` run in a child of it: a GPU that hangs costs one
test.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kdtp.config import ConfigError, EngineConfig
from kdtp.engine.plan import plan
from tests import apart

os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}  # no NVLink multicast
DEVICE = "cuda"
LOOK = """
import torch
from tests.gpu.conftest import missing
print(missing() or torch.cuda.device_count())
"""


def pytest_configure(config: pytest.Config) -> None:
    """The marker."""
    config.addinivalue_line("markers", "apart(seconds): run in a forked child that is ended after so many seconds")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run what is marked apart."""
    marker = pyfuncitem.get_closest_marker("apart")
    if marker is None:
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    apart.run(lambda: pyfuncitem.obj(**arguments), *marker.args)
    return True


@pytest.fixture(scope="session")
def found() -> str:
    """How many GPUs there are, or what is missing."""
    return apart.ask(LOOK, 60).strip()


@pytest.fixture(scope="session", params=[2, 4, 8])
def gpus(request: pytest.FixtureRequest, found: str) -> int:
    """How many GPUs a test takes."""
    if not found.isdigit():
        pytest.skip(f"{request.param} GPUs: {found}")
    if int(found) < request.param:
        pytest.skip(f"{request.param} GPUs: this machine has {found}")
    return int(request.param)


def need_legal(model: Path, tp: int, dtype: str = "float32") -> None:
    """Skip a test of a model that so many ranks cannot share."""
    try:
        plan(EngineConfig(str(model), tp, DEVICE, dtype))
    except ConfigError as error:
        pytest.skip(str(error))
