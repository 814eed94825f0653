"""test_kernels_places.py with MKL's kernels for other CPUs, as far as this one can run them.

What MKL does depends on the CPU's maker, which it asks a function of its own, and on the instructions it may use.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT

MAKER = """
#include <stdlib.h>
int mkl_serv_intel_cpu_true(void) { const char *says = getenv("MADE_BY_INTEL"); return says && *says == '1'; }
"""
PATHS = {"intel": ("1", ""), "intel-avx2": ("1", "AVX2"), "intel-sse42": ("1", "SSE4_2"), "other": ("0", "")}

# One process imports torch and is forked for each path: MKL asks when it first multiplies. First, whether the path is
# taken: 4 equal rows stay equal over 6 columns on Intel's paths only.
SCRIPT = """
import os, sys, pytest, torch

def run(made_by_intel, instructions):
    os.environ.update(MADE_BY_INTEL=made_by_intel, MKL_ENABLE_INSTRUCTIONS=instructions)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    y = torch.randn(1, 64).expand(4, 64).contiguous() @ torch.randn(64, 6)
    assert torch.equal(y, y[:1].expand(4, 6)) == (made_by_intel == "1"), "MKL took another path"
    return pytest.main(["-q", "-p", "no:cacheprovider", "tests/cpu/test_kernels_places.py"])

failed = []
for path in sys.argv[1:]:
    name, *settings = path.split(",")
    print(f"== {name}", flush=True)
    if not (child := os.fork()):
        code = 1
        try:
            code = run(*settings)
        except AssertionError as error:
            print(error)
        finally:
            sys.stdout.flush()
            os._exit(code)
    if os.waitpid(child, 0)[1]:
        failed.append(name)
sys.exit(f"failed: {failed}" if failed else 0)
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has another BLAS than MKL")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc here")
@pytest.mark.timeout(400)
def test_on_another_cpu(tmp_path):
    library = tmp_path / "maker.so"
    gcc = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-o", library]
    subprocess.run(gcc, input=MAKER, text=True, check=True)
    own = "intel" if "GenuineIntel" in Path("/proc/cpuinfo").read_text() else "other"  # test_kernels_places.py's
    paths = [",".join((name, *settings)) for name, settings in PATHS.items() if name != own]
    command = [sys.executable, "-c", SCRIPT, *paths]
    environment = os.environ | {"LD_PRELOAD": str(library)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
