"""The gap benchmark on a timeline made up, and on the CPU."""

import re
import sys

import pytest

from scripts import bench_gap
from scripts.bench_gap import by_host, measure


def test_a_gap_is_from_the_ids_to_the_next_kernel():
    spans = [(0.0, 5.0, "prompt"), (5.0, 6.0, "Memcpy DtoH")]
    for start in (10.0, 40.0, 70.0):
        spans += [
            (start, start + 1, "Memcpy HtoD"),
            (start + 1, start + 2, "kv_move_kernel"),
            (start + 3, start + 6, "void kdtp::embedding_kernel<float>"),
            (start + 6, start + 9, "kernel"),
            (start + 9, start + 10, "Memcpy DtoH"),
        ]
    assert measure([spans]) == {"gap": [23.0, 23.0], "kernels": [7.0, 7.0]}
    late = [(start + 2, end + 2, name) for start, end, name in spans]
    assert measure([late, spans]) == {"gap": [21.0, 21.0], "kernels": [9.0, 9.0]}
    with pytest.raises(ValueError, match="rounds: their traces are not whole"):
        measure([spans, spans[:-1]])


def test_the_hosts_gap_is_from_the_last_ranks_ids_to_the_last_ranks_next_step():
    one = [(n, 1000 * n + 100, 1000 * n + 200, 1000 * n + 500) for n in range(1, 6)]
    other = [(n, taken + 30, launched - 5, ids + 50) for n, taken, launched, ids in one]
    assert by_host([one, other], 2, 4) == {"taken": [0.58, 0.58], "launched": [0.65, 0.65], "round": [1.0, 1.0]}


def test_two_ranks_on_the_cpu(monkeypatch, capsys):
    """One way of decoding: all take the same path, and each start of an engine costs seconds."""
    monkeypatch.setattr(bench_gap, "WAYS", dict(list(bench_gap.WAYS.items())[1:]))
    monkeypatch.setattr(sys, "argv", ["bench_gap", "--tp", "2", "--device", "cpu", "--tokens", "12"])
    assert bench_gap.main() == 0
    out = capsys.readouterr().out
    (row,) = (re.split(r" {2,}", line) for line in out.splitlines()[2:])
    assert row[:2] == ["n-gram, 16 nodes", "2"] and row[3:5] == ["-", "-"], out
    assert all(re.match(r"\d+ \(", cell) for cell in row[5:]), out
