"""The rank's benchmark: the library takes a step's arguments, its bytes are the design's, its tables are whole."""

from __future__ import annotations

import re

import pytest
import torch

from scripts import bench_rank
from scripts.bench_rank import FULL, Bench, Routing, Scope, rehearse, show, whole_bytes
from scripts.dry_run import dry_run
from scripts.k26 import EXPERTS, LAYERS, Tensors

CPU = Tensors(torch.device("cpu"))
UNIFORM = Routing(model=False, overlap=0.0)
STEP = [
    *("embedding", "rms_norm"),
    *("linear", "rms_norm", "linear", "mla_prep", "linear_heads", "mla_tree", "linear_heads", "linear", "rms_norm"),
    *("linear", "silu_mul", "linear", "rms_norm"),
    *("linear", "rms_norm", "linear", "mla_prep", "linear_heads", "mla_tree", "linear_heads", "linear", "rms_norm"),
    *("linear", "router", "linear", "silu_mul", "linear", "moe", "rms_norm", "linear", "argmax"),
]


def bench(scope: Scope, routing: Routing = UNIFORM) -> Bench:
    """Two layers: one dense, one with experts."""
    return Bench(CPU, 2, routing, scope)


def test_a_step_launches_the_layers_ops():
    with dry_run() as paper:
        bench(Scope((8,), (1024,), 1, 1)).note((8, 1024))
    ops = [op for op, _ in paper.calls]
    assert sorted(ops) == sorted(STEP)
    assert ops[:15] == STEP[:15] and ops[-2:] == STEP[-2:]


def test_bytes_are_those_of_the_design():
    # kernels.md, section 9: what a rank reads at 1k with M = 1, and at 32k.
    with dry_run():
        rank = bench(Scope((1,), (1024, 32768), 1, 1))
        for context, gigabytes in ((1024, 6.10), (32768, 8.33)):
            notes, _, _ = rank.note((1, context))
            assert whole_bytes(notes) / 1e9 == pytest.approx(gigabytes, rel=0.01)


def test_the_router_chooses_if_it_is_asked_to():
    point = Scope((8,), (1024,), 1, 1)
    with dry_run() as paper:
        for routing in (UNIFORM, Routing(model=True, overlap=0.0)):
            paper.calls.clear()
            notes, _, choices = bench(point, routing).note((8, 1024))
            (call,) = notes.calls["moe"]
            (router,) = [arguments for op, arguments in paper.calls if op == "router"]
            assert (call.args[1].data_ptr() == router.ids) is routing.model
            assert (choices[1] is None) is routing.model


def test_overlap_saves_bytes():
    with dry_run():
        reads = []
        for overlap in (0.0, 1.0):
            notes, _, _ = bench(Scope((32,), (1024,), 1, 1), Routing(False, overlap)).note((32, 1024))
            reads.append(notes.reads["moe"])
    assert reads[1] == 8 * 3 * 256 * 7168 * (32 / 2 + 2) // 32 < reads[0] / 15
    assert EXPERTS == 384


@pytest.fixture
def times(monkeypatch):
    """Without a GPU: a graph calls, and takes a millisecond."""
    monkeypatch.setattr(bench_rank, "capture", lambda call: (None, call()))
    monkeypatch.setattr(bench_rank, "replays", lambda graph, times: [1000.0] * times)
    monkeypatch.setattr(bench_rank, "replays_alone", lambda graph, times: [1500.0] * times)
    monkeypatch.setattr(torch, "empty", torch.zeros)


def test_tables(times):
    scope = Scope((1, 8), (1024,), 6, 3)
    with dry_run():
        points = [bench(scope).measure(point) for point in scope.points]
    points[0]["as_eager"] = False
    machine = dict.fromkeys(("gpu", "gib", "driver", "torch", "cuda", "date", "cpu", "cores", "load"), "?")
    result = {"machine": machine, "read": {"bytes_per_s": 4e12, "by": "sum"}, "layers": LAYERS, "routing": "uniform"}
    text = show(result | {"weights": 76e9, "build_s": 3.0, "points": points})
    assert "medians of 6 replays, wall of 3, graphs of one op of 3" in text
    floor = points[1]["bytes"] / 4e12 * 1e3
    step = [f"{x:.3f}" for x in (1.0, 1.0, 1.0, 1.5)]
    wanted = ["8", "1024", *step, f"{points[1]['bytes'] / 1e9:.2f}", f"{floor:.3f}", f"{1 / floor:.2f}"]
    assert [*wanted, "9.18", "9.18", "5.0", "yes"] in [line.split() for line in text.splitlines()]
    assert [line.split()[-1] for line in text.splitlines()[5:7]] == ["NO", "yes"]
    assert re.search(r"^q_b +1\.000 +0% +1\.000 +0%$", text, re.MULTILINE)
    assert re.search(r"^silu_mul +0\.067 +0\.067 *$", text, re.MULTILINE)  # 2 calls, 15 times in a graph
    assert len(text.splitlines()) < 45


def test_a_rehearsal_names_every_point():
    lines = rehearse(FULL, Routing(model=True, overlap=0.0)).splitlines()
    assert len(lines) == 11 and all(re.match(r"M \d+, context \d+: 33 calls", line) for line in lines[:10])


@pytest.mark.parametrize(
    ("flags", "error"), [(["--overlap", "2"], "--overlap"), (["--layers", "0"], "must be at least 1")]
)
def test_illegal_flags(flags, error, capsys):
    with pytest.raises(SystemExit):
        bench_rank.main(flags)
    assert error in capsys.readouterr().err
