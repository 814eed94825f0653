"""The gap benchmark on a timeline made up, and without a GPU."""

import subprocess
import sys

import torch

from scripts.bench_gap import measure
from tests.conftest import ROOT


def test_a_gap_is_from_the_ids_to_the_next_kernel():
    spans = [(0.0, 5.0, "prompt"), (5.0, 6.0, "Memcpy DtoH")]
    for start in (10.0, 40.0, 70.0):
        spans += [
            (start, start + 1, "Memcpy HtoD"),
            (start + 3, start + 9, "kernel"),
            (start + 9, start + 10, "Memcpy DtoH"),
        ]
    assert measure(spans) == {"gap": [23.0, 23.0], "kernels": [7.0, 7.0]}


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        return
    done = subprocess.run(
        [sys.executable, "scripts/bench_gap.py"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (1, "bench_gap: no CUDA device\n")
