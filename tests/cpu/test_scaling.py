"""docs/scaling.md says what scripts/scaling.py computes, and that agrees with the shard's benchmark and the library."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from kdtp.kernels import cuda
from scripts import k26, k26_cost, scaling
from scripts.bench_rank import Bench, Routing, Scope, whole_bytes
from scripts.dry_run import dry_run
from scripts.k26 import EXPERTS, LAYERS, Tensors, hit, route
from scripts.k26_cost import ALWAYS, EXPERT_BYTES, KV_BYTES, PARTS, Machine, expected_experts, step_bytes
from scripts.scaling import main, measured, parse, report, updated
from tests.conftest import ROOT

CPU = Tensors(torch.device("cpu"))
DOC = (ROOT / "docs" / "scaling.md").read_text()
BENCHMARKS = (ROOT / "docs" / "benchmarks.md").read_text()
MACHINE = Machine("a machine", 100.0, 1e12, 1e15, ((1000.0, 5.0), (2000.0, 6.0), (4000.0, 10.0)))


def test_the_document_is_up_to_date():
    tables = report().tables()
    assert sorted(re.findall(r"<!-- scaling: (\S+) -->", DOC)) == sorted(tables)
    assert updated(DOC, tables) == DOC, "run `python scripts/scaling.py --update docs/scaling.md`"


def test_an_update_notices_what_changed():
    tables = report().tables()
    broken = DOC.replace("304 k", "305 k")
    assert broken != DOC and updated(broken, tables) == DOC
    with pytest.raises(ValueError, match="scaling: weight: no such table; there are weights, "):
        updated(DOC.replace("scaling: weights", "scaling: weight"), tables)


def test_bytes_are_those_of_the_shard():
    scope = Scope((1, 8), (1024, 32768), 1, 1)
    with dry_run():
        rank = Bench(CPU, 2, Routing(model=False, overlap=0.0), scope)
        for m, context in scope.points:
            notes, _, choices = rank.note((m, context))
            experts = hit(choices[1][0]) * EXPERT_BYTES
            assert whole_bytes(notes) == pytest.approx(ALWAYS + experts + (context + m) * KV_BYTES, rel=1e-7)
            reads = notes.reads
    part = {part.name.split(",")[0]: part.bytes for part in PARTS}
    assert reads["q_a + kv_a"] * LAYERS / 2 == part["q_a + kv_a"] and reads["head"] == part["head"]
    assert (reads["shared gate_up"] + reads["shared down"]) * (LAYERS - 1) == part["shared expert"]
    assert reads["dense gate_up"] + reads["dense down"] == part["dense MLP"]


def test_floors_are_near_those_that_were_measured():
    # There a draw of experts, here the expected number.
    section = BENCHMARKS.split("## One TP=8 rank")[1]
    found = re.findall(r"^(\d+) +(\d+)(?: +[\d.]+){4} +([\d.]+) .*yes$", section, re.MULTILINE)
    assert len(found) >= 6
    for m, context, gigabytes in found:
        assert step_bytes(int(m), int(context), 0.0) / 1e9 == pytest.approx(float(gigabytes), rel=0.02)


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 1.0])
def test_expected_experts_are_those_of_the_generator(overlap):
    for m in (1, 8, 64):
        drawn = np.mean([hit(route(CPU, m, overlap, seed)[0]) for seed in range(20)])
        assert expected_experts(m, overlap) == pytest.approx(drawn, abs=0.02 * EXPERTS)
    assert expected_experts(1, overlap) == pytest.approx(8.0)


@pytest.mark.parametrize("rows", [96, 128, 256, 512])
def test_working_memory_is_what_the_library_wants(rows):
    with dry_run() as paper:
        if not paper.checks:
            pytest.skip("the library is not built, or there is a GPU")
        batch = k26.tree(CPU, rows, k26_cost.LONGEST)
        kv = CPU.normal(batch.cache_rows, k26.KV_ROW)
        cuda.mla_tree(CPU.normal(rows, k26.HEADS, k26.KV_ROW), kv, batch.keys, k26.SCALE, k26.LORA)
        experts = (*CPU.experts(2 * k26.INTER, k26.HIDDEN), *CPU.experts(k26.HIDDEN, k26.INTER))
        cuda.moe_int4(CPU.normal(rows, k26.HIDDEN), *route(CPU, rows, 0.0, 0), *experts)
        wanted = sum(arguments.workspace_bytes for _, arguments in paper.calls)
    # The logits are in no workspace.
    found = k26_cost.graph_memory(rows, batch.keys.path.shape[1]) - rows * k26.VOCAB * 4
    assert found == pytest.approx(wanted, rel=0.05)


def test_a_wait_is_a_line_between_points():
    waits = [MACHINE.wait(n) for n in (1, 1000, 1500, 2000, 3000, 5000)]
    assert waits == [5.0, 5.0, 5.5, 6.0, 8.0, 12.0]
    rows = 1  # 14,336 bytes, far up the last line
    assert MACHINE.collectives(rows) == pytest.approx((123 * (10 + 10_336 * 0.002) + 5) / 1e3)


def test_attention_counts_by_what_takes_longer():
    slow = Machine("slow", 100.0, 1e12, 1e12, MACHINE.all_reduce)
    reads = 1e3 * step_bytes(8, 1024, 0.0) / 1e12
    assert MACHINE.floor(8, 1024, 0.0) == pytest.approx(reads)
    flops = 61 * 8 * 8 * (1024 + 8) * 2 * (576 + 512)
    assert slow.floor(8, 1024, 0.0) == pytest.approx(reads - 1e-9 * 1032 * KV_BYTES + 1e-9 * flops)


def test_steps_come_from_the_benchmarks():
    rate, steps = measured(BENCHMARKS)
    assert 3e12 < rate < 5e12 and {(1, 1024), (8, 1024), (1, 32768)} <= set(steps)
    text = "## One TP=8 rank\nread rate 4.00 TB/s\n1  1024  6.1  x  yes\n8  1024  9.2  x  NO\n"
    text += "## More\n1  1024  7.0  x  yes\n"
    assert measured(text) == (4e12, {(1, 1024): 6.1, (8, 1024): 9.2})
    for wrong in ("", text.replace("read rate", "rate"), text.replace("8  1024", "1  1024")):
        with pytest.raises(ValueError, match="want one table"):
            measured(wrong)


def test_figures_can_be_given(capsys):
    flags = "--machine pro --read-rate 2 --matrix-rate 500 --memory 180 --all-reduce 10"
    flags += " --overlap 0.5 --rows 8 --contexts 1000"
    found, document = parse(flags.split(), report())
    (machine,) = found.machines
    assert (machine.read_rate, machine.matrix_rate, machine.memory) == (2e12, 500e12, 180.0) and document is None
    assert machine.wait(1.0) == machine.wait(1e9) == 10.0
    main(flags.split())
    tables = capsys.readouterr().out
    floor = 1e3 * step_bytes(8, 1000, 0.5) / 2e12
    assert re.search(rf"^1000 +{floor:.2f} +{floor + 1.24:.2f}$", tables, re.MULTILINE)
    assert "H200" not in tables and "projection" not in tables


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--read-rate", "2"], "--read-rate: say of which --machine"),
        (["--machine", "pro", "--memory", "0"], "--memory: invalid positive value"),
        (["--overlap", "1.5"], "--overlap: invalid share value"),
        (["--rows", "0"], "--rows: invalid count value"),
        (["--update", "x.md", "--overlap", "0.5"], "--update: takes no other option"),
    ],
)
def test_illegal_flags(flags, error, capsys):
    with pytest.raises(SystemExit):
        main(flags)
    assert error in capsys.readouterr().err


def test_an_update_writes(tmp_path):
    document = tmp_path / "scaling.md"
    document.write_text(DOC.replace("304 k", "305 k"))
    scaling.main(["--update", str(document)])
    assert document.read_text() == DOC
