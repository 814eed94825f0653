"""The trees' benchmark: what it compares on the CPU is right, its table is whole, and it says what it lacks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kdtp.spec import mask
from scripts import bench_tree
from scripts.bench_tree import FULL, QUICK, Scope, candidates, rehearse, show, take_turns
from scripts.measure import spread
from scripts.tree_ways import Case, by_heap, by_spec, visible


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
    took = {"least": 3, "seconds": 60.0, "took": 71.4}
    lines = show({"machine": about, **took, "cases": cases}).splitlines()
    assert lines[0].startswith("a GPU; a CPU, 2 cores")
    assert lines[1] == "60 s shared out, at least 3 runs of each point; took 71 s"
    assert [line.split() for line in lines[3:]] == [
        ["7", seqs, "16", "16", "2.0", "3.0", "4.0", "5.0", "6.0", "7.0", "1.3", "2"] for seqs in ("1", "4")
    ]


class Clock:
    """Time that passes only in what is timed."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    def way(self, name, seconds, order):
        def run():
            order.append(name)
            self.now += seconds

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(bench_tree, "time", clock)
    return clock


@pytest.mark.parametrize(("until", "turns"), [(0.0, 2), (100.0 + 1.5 * 3, 3), (1e9, 4)])
def test_ways_take_turns_until_the_time_is_up(clock, until, turns):
    order = []
    found = take_turns([clock.way("quick", 0.5, order), clock.way("slow", 1.0, order)], (2, 4), until)
    assert order == ["quick", "slow"] * turns
    np.testing.assert_allclose(found, [[0.5e6] * turns, [1e6] * turns])


def test_a_sweep_keeps_its_time_and_slow_points_have_fewer_runs(clock, monkeypatch):
    def build(case, runs, until):
        seconds = case.seqs * case.budget * 1e-3
        (samples,) = take_turns([clock.way("", seconds, [])], runs, until)
        return {"runs": len(samples), "seconds": seconds}

    monkeypatch.setattr(bench_tree, "measure_case", build)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    found = bench_tree.measure(Scope((1, 10, 1000), (1, 4), (7,), (3, 200), 60.0))
    assert [case["runs"] for case in found["cases"][:2]] == [200, 200]  # quick ones leave time to the others
    slow, slowest = found["cases"][2], found["cases"][5]
    assert 200 > slow["runs"] > slowest["runs"] >= 3
    assert 50 < found["took"] <= 60 + slowest["seconds"]
    hurried = bench_tree.measure(Scope((1000,), (4, 4), (7,), (3, 200), 1.0))
    assert [case["runs"] for case in hurried["cases"]] == [3, 3] and hurried["took"] == pytest.approx(24.0)


def test_a_rehearsal_builds_every_case():
    lines = rehearse(QUICK).splitlines()
    assert [line.split()[:3] for line in lines[1:5]] == [["7", s, b] for s in ("1", "4") for b in ("16", "64")]
    assert all(0 < float(x) < 1e7 for line in lines[1:5] for x in line.split()[3:])
    assert lines[-1].startswith("4 calls, ")
    assert (FULL.budgets[0], FULL.budgets[-1], FULL.seqs[0], FULL.seqs[-1], FULL.seconds) == (16, 1024, 1, 64, 60.0)
