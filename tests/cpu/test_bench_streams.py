"""The benchmark of speculation by streams: every way writes the texts, and `auto` says what it expected."""

from __future__ import annotations

import sys

import pytest

from kdtp.engine import coordinator
from kdtp.engine import widths as engine_widths
from scripts import bench_streams


def test_ways_side_by_side(monkeypatch, capsys):
    for module in (coordinator, engine_widths):
        monkeypatch.setattr(module, "time", module.time)  # main puts another clock there
    flags = ("--streams", "2,1", "--ways", "plain,tree of 3,auto,auto counting", "--budgets", "3", "--most", "3")
    sizes = ("--answers", "3", "--tokens", "9", "--warm", "1", "--prompt-tokens", "8", "--slice", "0.05")
    monkeypatch.setattr(sys, "argv", ["bench_streams.py", *flags, *sizes])
    bench_streams.main()
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    heads = [i for i, line in enumerate(lines) if line[1:2] == ["streams"]]
    assert [lines[i][0] for i in heads] == ["2", "1"]
    for head in heads:
        plain, tree, auto, counting = (lines[head + i] for i in (1, 2, 3, 4))
        assert plain[0] == "plain" and plain[-8] == "100%" and plain[-9] == "0.00"
        assert tree[:3] == ["tree", "of", "3"] and tree[-8] != "100%" and 0 < float(tree[-9]) <= 2 * 3
        assert auto[0] == "auto" and float(auto[1]) > 0
        assert counting[:2] == lines[head + 5][:2] == ["auto", "counting"]
        assert float(lines[head + 6][-2]) > 0  # the policy's own milliseconds


def test_a_way_that_is_none():
    with pytest.raises(SystemExit):
        bench_streams.parse(["--ways", "plain,tree of 5"])
