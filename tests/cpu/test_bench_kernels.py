"""The kernels' benchmark: every kernel has cases, which the library takes; torch gives the same shapes."""

from __future__ import annotations

import re

import pytest
import torch

from kdtp.kernels import abi, cuda
from scripts import bench_kernels
from scripts.bench_kernels import MOST_LAUNCHES, Scope, measure_case, rehearse, show
from scripts.dry_run import PARAMS, dry_run
from scripts.k26 import EXPERTS, TOPK, Tensors, binary, hit, route, tree
from scripts.kernel_cases import Cases

CPU = Tensors(torch.device("cpu"))
ROWS = (1, 8, 16, 32, 64)


def test_every_kernel_has_cases():
    ops = Cases(CPU, ROWS, (1024,)).ops
    several_gpus = {"all_reduce"}  # in scripts/bench_allreduce.py
    assert set(ops) | several_gpus == set(abi.structs(PARAMS.read_text()))


def test_the_library_takes_every_case():
    text = rehearse(Scope(ROWS, (1024, 131072), 1), list(Cases(CPU, ROWS, ()).ops))
    counts = dict(re.findall(r"^(\w+): (\d+) calls", text, re.MULTILINE))
    assert counts["linear"] == "45" and counts["mla_tree"] == "10" and counts["tree_build"] == "4"
    assert all(int(count) >= (1 if op == "moe_repack" else 4) for op, count in counts.items())


def test_a_rehearsal_notices_what_is_illegal():
    with dry_run() as paper:
        if not paper.checks:
            pytest.skip("the library is not built, or there is a GPU")
        with pytest.raises(abi.KernelError, match="linear: x strides 100, 0: must be multiples of 8"):
            cuda.linear(CPU.normal(2, 100)[:, :64], CPU.matrix(64, 32))
        with pytest.raises(abi.KernelError, match="moe: hidden 32"):
            x, choice = CPU.normal(1, 32), route(CPU, 1, 0.0, 0)
            cuda.moe_int4(x, *choice, *CPU.experts(128, 32), *CPU.experts(32, 64))


def test_torch_gives_what_the_kernel_gives():
    with dry_run():
        for op in Cases(CPU, (1, 3), (1024,)).ops.values():
            for case in op():
                assert case.calls and len(case.torch) in (0, len(case.calls))
                assert not case.torch or shapes(case.torch[0]()) == shapes(case.calls[0]()), case.name


def shapes(result: object) -> list[torch.Size]:
    """Of one tensor or several, without dims of heads in front. A kernel that writes in place gives nothing."""
    several = result if isinstance(result, tuple) else (result,)
    return sorted(
        x.transpose(0, 1).shape if x.dim() == 3 and x.shape[0] == 8 else x.shape for x in several if in_form(x)
    )


def in_form(x: object) -> bool:
    """Whether it is a result, and not the cache."""
    return isinstance(x, torch.Tensor) and x.numel() < 1 << 24


@pytest.fixture
def times(monkeypatch):
    """Without a GPU: a graph is what it calls, and takes as many microseconds as it has calls."""
    monkeypatch.setattr(bench_kernels, "capture", lambda call: (call(), None))
    monkeypatch.setattr(bench_kernels, "run_all", lambda calls: len(list(calls)))
    monkeypatch.setattr(bench_kernels, "replays", lambda graph, times: [float(graph)] * times)


def test_tables(times):
    with dry_run():
        found = Cases(CPU, (1, 16), (1024,))
        ops = ("linear", "mla_tree", "tree_build", "moe")
        cases = [measure_case(op, case, 5) for op in ops for case in found.ops[op]()]
    assert all(case["kdtp"] == {"n": 5, "median": 1.0, "p10": 1.0, "p90": 1.0} for case in cases)
    machine = dict.fromkeys(("gpu", "gib", "driver", "torch", "cuda", "date", "cpu", "cores", "load"), "?")
    text = show({"machine": machine, "read": {"bytes_per_s": 4e12, "by": "sum"}, "cases": cases})
    lines = text.splitlines()
    assert any(re.fullmatch(r"linear q_b 1536x1536 +1\.0 \(1\.0\) +1\.0 \(1\.0\)", line) for line in lines)
    assert any(re.fullmatch(r"linear q_b 1536x1536 +4\.72 118% +4\.72 118%", line) for line in lines)
    assert any(re.fullmatch(r"tree_build +- +1\.0", line) for line in lines)
    assert any(re.fullmatch(r"mla_tree 1k +1\.18  30%  18 +1\.20  30% 290", line) for line in lines)
    assert len(lines) < 60


def test_sets_take_turns(times, monkeypatch):
    seen = []
    monkeypatch.setattr(bench_kernels, "run_all", lambda calls: seen.append([call() for call in calls]) or 1)
    bench_kernels.time_of([lambda: 0, lambda: 1, lambda: 2], 0, 1)
    assert seen == [[0, 1, 2] * -(-MOST_LAUNCHES // 3)]


@pytest.mark.parametrize("overlap", [0.0, 0.5, 1.0])
def test_routing_to_order(overlap):
    ids, weights = route(CPU, 32, overlap, seed=1)
    assert ids.shape == weights.shape == (32, TOPK) and ids.dtype == torch.int32
    assert (ids.diff(dim=1) > 0).all() and ids.min() >= 0 and ids.max() < EXPERTS
    common = set.intersection(*(set(row) for row in ids.tolist()))
    assert len(common) == overlap * TOPK
    alone = TOPK * (1 - overlap)
    expected = TOPK * overlap + (EXPERTS - TOPK * overlap) * (1 - (1 - alone / EXPERTS) ** 32)
    assert abs(hit(ids) - expected) < 20
    torch.testing.assert_close(weights.sum(1), torch.full((32,), 2.827))


def test_trees_lie_in_the_cache():
    batch = tree(CPU, 64, 1000)
    assert binary(7) == [-1, 0, 0, 1, 1, 2, 2]
    assert len(set(batch.rows.tolist())) == 64 and batch.rows.max() < batch.cache_rows
    where = torch.arange(1000, 1064)
    assert torch.equal(batch.keys.pages[0, where // 64] * 64 + where % 64, batch.rows.int())
    assert batch.keys.row_depth[-1] == 6 and batch.keys.path[62].tolist() == [0, 2, 6, 14, 30, 62, 62]
    assert batch.keys.path[63].tolist() == [0, 1, 3, 7, 15, 31, 63]
