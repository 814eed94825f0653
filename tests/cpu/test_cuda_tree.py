"""tree_build and tree_accept of csrc/, run on the CPU: the cases for the GPU, and many small trees."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from kdtp import kernels
from tests.cpu.cuda_on_cpu import Library
from tests.gpu import cases_tree

pytestmark = pytest.mark.xdist_group("cuda-tree")  # they share the compiled kernels


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if not shutil.which("g++"):
        pytest.skip("no g++")
    return Library("tree", tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def cases():
    return list(cases_tree.cases())


def test_cases(library, cases):
    assert {case.op for case in cases} == {"tree_build", "tree_accept"}
    assert not {case.name: wrong for case in cases if (wrong := library.wrong(case))}


STEPS = [0.0, -0.0, -0.25, -0.5, -0.5000001, -0.75, -1.0, -30.1, -1e-8, -1e-45, -3e38, -np.inf]


def test_small_trees(library):
    """Few values, so that equal scores are common; every shape."""
    rng = np.random.default_rng(0)
    for trial in range(250):
        seqs, length, k = rng.integers(1, 4), rng.integers(0, 9), rng.integers(1, rng.choice([5, 17, 65]))
        after = trial % 2 and k < 17
        shape = (seqs, length, k, k) if after else (seqs, length, k)
        lp = rng.choice(STEPS[: rng.integers(1, len(STEPS) + 1)], shape).astype(np.float32)
        if trial % 3 == 0:
            lp *= rng.random(lp.shape, np.float32)
        if not after:
            lp = -np.sort(-lp, axis=2)
        if trial % 5 == 0 and length:
            lp[0, rng.integers(0, length), ..., rng.integers(0, k)] = rng.choice([np.nan, np.inf])
        most = int(rng.integers(0, 80))
        budgets, limits = rng.integers(-1, most + 3, seqs), rng.integers(-1, length + 2, seqs)
        kind = int(rng.integers(0, 3))
        case = cases_tree.build_case(str(trial), lp, budgets.tolist(), limits.tolist(), most + 1, trial, kind)
        assert not library.wrong(case), trial


def test_a_wrong_tree_is_seen(library, cases):
    """One bit of each output, and a refusal."""
    case = next(case for case in cases if case.name == "tree_build-16-7x16")
    for name, output in case.outputs.items():
        expected = output.expected.copy()
        expected.reshape(-1).view(np.uint8)[0] ^= 1
        outputs = {**case.outputs, name: dataclasses.replace(output, expected=expected)}
        assert library.wrong(dataclasses.replace(case, outputs=outputs)) == [name]
    with pytest.raises(ValueError, match=r"tree_build: before 2: must be 1, or k, 16"):
        library.wrong(dataclasses.replace(case, scalars={**case.scalars, "before": 2}))


def test_walks_are_of_cuda_tensors():
    ints, longs = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(NotImplementedError, match=r"^tree_accept: tokens is on cpu: this op has only a CUDA form"):
        kernels.tree_accept(longs[:, None], ints[:, None], ints, longs[:, None])
