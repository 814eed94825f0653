"""test_kernels_places.py with MKL's kernels for other CPUs, as far as this one can run them.

What MKL does depends on the CPU's maker, which it asks a function of its own, and on the instructions it may use.
"""

import os
import shutil
import subprocess
import sys

import pytest
import torch

from tests.conftest import ROOT

MAKER = "int mkl_serv_intel_cpu_true(void) { return %d; }"
PATHS = {"intel": (1, ""), "intel-avx2": (1, "AVX2"), "intel-sse42": (1, "SSE4_2"), "other": (0, "")}

# First, whether the path is taken: 4 equal rows stay equal over 6 columns on Intel's paths only.
SCRIPT = """
import sys, pytest, torch
torch.manual_seed(0)
y = torch.randn(1, 64).expand(4, 64).contiguous() @ torch.randn(64, 6)
assert torch.equal(y, y[:1].expand(4, 6)) == (sys.argv[1] != "other"), "MKL took another path"
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "tests/cpu/test_kernels_places.py"]))
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has another BLAS than MKL")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here")
@pytest.mark.parametrize("path", PATHS)
def test_on_another_cpu(path, tmp_path):
    is_intel, instructions = PATHS[path]
    library = tmp_path / "maker.so"
    gcc = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(gcc, input=MAKER % is_intel, text=True, check=True)
    environment = os.environ | {"LD_PRELOAD": str(library), "MKL_ENABLE_INSTRUCTIONS": instructions}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, path], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
