"""The trees' benchmark: what it compares on the CPU is right, its table is whole, and it says what it lacks."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from kdtp.spec import mask
from scripts.bench_tree import candidates, show
from scripts.measure import spread
from scripts.tree_ways import Case, by_heap, by_spec, visible
from tests.conftest import ROOT


@pytest.mark.parametrize("case", [Case(7, 3, 16), Case(15, 2, 64), Case(7, 2, 256)])
def test_the_heap_builds_the_tree(case):
    lp, ids = candidates(case)
    assert lp.dtype == np.float32 and lp.shape == ids.shape == (case.seqs, case.length, case.width)
    assert (np.diff(lp) <= 0).all() and np.exp(lp.astype(np.float64)).sum(2).max() <= 1.0
    for row, names in zip(lp, ids, strict=True):
        (tokens, parents), (own_tokens, own_parents) = (f(row, names, 7, case.budget) for f in (by_heap, by_spec))
        # Doubles order a few sums that are equal in float32: the nodes are the same, some in another place.
        assert len(tokens) == case.budget + 1 and sorted(tokens) == sorted(own_tokens)
        assert np.mean(np.equal(parents, own_parents)) > 0.9
        assert (visible(own_parents) == mask.ancestors(own_parents).numpy()).all()


def test_the_table_has_every_case():
    times = ("kernel", "gpu", "heap", "heap alone", "spec", "spec alone")
    case = {"length": 7, "seqs": 4, "budget": 16, "k": 16, "nodes": 16.0}
    cases = [
        case | {"seqs": seqs} | {name: spread([1.0 + i, 3.0 + i]) for i, name in enumerate(times)} for seqs in (1, 4)
    ]
    about = {"gpu": "a GPU", "cpu": "a CPU", "cores": 2, "load": 0.5, "torch": "2"}
    lines = show({"machine": about, "cases": cases}).splitlines()
    assert lines[0].startswith("a GPU; a CPU, 2 cores")
    assert [line.split() for line in lines[2:]] == [
        ["7", seqs, "16", "16", "2.0", "3.0", "4.0", "5.0", "6.0", "7.0", "1.3", "2"] for seqs in ("1", "4")
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "bench_tree.py")], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "bench_tree: no CUDA device\n")
