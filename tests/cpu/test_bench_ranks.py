"""Benchmarks of several ranks without a GPU: what sums are right, tables, and a failure that is everybody's."""

from __future__ import annotations

import re

import pytest
import torch

from kdtp.kernels import cuda
from kdtp.model.comm import Comm, Solo, sum_in_order
from kdtp.model.layers import Norm
from scripts import bench_allreduce, rank_tp, ranks, reduce_ways
from scripts.dry_run import dry_run
from scripts.k26 import Tensors, tree
from scripts.rank_model import ALONE, Rank, run

MACHINE = dict.fromkeys(("gpu", "gib", "driver", "torch", "cuda", "date", "cpu", "cores", "load"), "?")


class Counted(Comm):
    """One of two ranks, alone."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.sums, self.normed = 0, 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self.sums += 1
        return x

    def all_reduce_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        self.normed += 1
        return residual, cuda.rms_norm(x, norm.weight, norm.eps, residual)


def test_a_step_has_two_sums_a_layer_and_one_of_the_embedding() -> None:
    tensors = Tensors(torch.device("cpu"))
    batch = tree(tensors, 8, 1024)
    with dry_run() as paper:
        rank = Rank(tensors, 3, batch.cache_rows)
        ops = []
        for make, counts in ((rank_tp.Fused, (1, 6)), (rank_tp.Separate, (7, 0))):
            comm = Counted()
            paper.calls.clear()
            rank.step(batch, [None] * 3, run, make(comm))
            assert (comm.sums, comm.normed) == counts
            ops.append([op for op, _ in paper.calls])
        paper.calls.clear()
        rank.step(batch, [None] * 3, run, ALONE)
        assert ops[0] == ops[1] == [op for op, _ in paper.calls]


class Other(Comm):
    """The first of two ranks; the other one gathers the same, `beside` what differs."""

    rank, size = 0, 2

    def __init__(self, beside: float = 0.0) -> None:
        self._beside = beside

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x + self._beside if x.dtype == torch.bfloat16 else x])


def test_who_differs_is_named() -> None:
    values, ids, residual = torch.randn(2), torch.arange(2), torch.randn(2, 8).to(torch.bfloat16)
    found = {name: (values.clone(), ids.clone(), residual.clone()) for name in ("engine", "gather", "nccl")}
    assert rank_tp.unlike(Other(), found) == []
    assert rank_tp.unlike(Other(1.0), found) == ["ranks"]
    found["nccl"][2][1, 3] += 1
    found["gather"][0][1] += 1
    assert rank_tp.unlike(Other(), found) == ["gather", "nccl"]
    found["engine"][0][0] = float("nan")
    assert rank_tp.unlike(Other(), found) == ["engine", "gather", "nccl"]
    assert rank_tp.unlike(Other(), {}) == []


def test_what_counts_as_a_sum() -> None:
    x = torch.randn(2, 64).to(torch.bfloat16)
    near = (x.float() * (1 + 2**-8)).to(torch.bfloat16)
    assert reduce_ways._alike(x, x, exact=True) and not reduce_ways._alike(near, x, exact=True)
    assert reduce_ways._alike(near, x, exact=False)
    assert not reduce_ways._alike(sum_in_order(torch.stack([x, x])), x, exact=False)


def test_a_failure_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda values, device: tensor(values))
    assert ranks.everywhere(Solo(), lambda: 5) == (5, "")
    assert ranks.everywhere(Solo(), lambda: 1 // 0) == (None, "ZeroDivisionError: integer division or modulo by zero")


def test_tables() -> None:
    points = {1: {"push": [4.0, 9.0], "nccl": [11.0, 54.0]}, 292: {"nccl": [30.0, 60.0]}}
    result = {"machine": MACHINE, "ranks": 2, "own_gpus": True, "most": 1 << 19, "points": points}
    text = bench_allreduce.show(result | {"missing": {"1-shot, M = 1": "Oops: no"}, "wrong": {"push": [0, 20]}})
    lines = [line.split() for line in text.splitlines()]
    assert ["M", "=", "1", "14", "4.0", "11.0"] in lines and ["M", "=", "292", "4088", "-", "60.0"] in lines
    assert "no 1-shot, M = 1: Oops: no" in text and "wrong: push 0/20" in text and "up to 512 KiB" in text
    ms = {"none": 4.0, "engine": 5.0, "gather": 6.0}
    result = {"machine": MACHINE, "ranks": 2, "layers": 61, "routing": "uniform", "most": 0, "missing": {}}
    points = [{"rows": 8, "ms": ms, "unlike": []}]
    points.append({"rows": 16, "ms": ms | {"nccl": 7.0}, "unlike": ["gather", "nccl", rank_tp.RANKS]})
    text = rank_tp.show(result | {"points": points})
    figures = ["4.000", "5.000", "20.0%", "8.1", "-", "-", "6.000"]
    wanted = [["8", *figures, "-", "yes", "-"], ["16", *figures, "7.000", "NO: gather, ranks", "no"]]
    assert [re.split(r" {2,}", line.strip()) for line in text.splitlines()[-2:]] == wanted
