"""Benchmarks that need a GPU say so where there is none, as their one line on stderr. In this process: a program of its
own would spend seconds on importing torch."""

from __future__ import annotations

import runpy
import sys

import pytest
import torch

from tests.conftest import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "command",
    [
        *("bench_allreduce", "bench_gap", "bench_kernels", "bench_rank", "bench_rank --tp 2", "bench_tree"),
        *("bench_drafts --device cuda", "bench_streams --device cuda"),
    ],
)
def test_without_a_gpu_it_says_so(command, monkeypatch, capsys):
    name, *flags = command.split()
    script = str(ROOT / "scripts" / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(script, run_name="__main__")
    out, error = capsys.readouterr()
    if isinstance(end.value.code, str):  # which Python prints, and ends with 1
        code, error = 1, error + end.value.code + "\n"
    else:
        code = end.value.code
    why = "device = 'cuda': this machine has no NVIDIA driver; must be cpu" if "cuda" in flags else "no CUDA device"
    assert (code, out, error) == (1, "", f"{name}: {why}\n")
