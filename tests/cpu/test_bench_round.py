"""The round's benchmark runs, and reports what it promises. No time is judged: machines differ."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scripts.bench_round import BY_PLACE, PARTS, STAGES, show
from tests.conftest import ROOT

pytestmark = pytest.mark.xdist_group("bench-round")  # they share the run
SPREAD = {"n", "median", "p10", "p90"}


@pytest.fixture(scope="module")
def result():
    command = [sys.executable, str(ROOT / "scripts" / "bench_round.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert not done.stderr, done.stderr
    return json.loads(done.stdout)


def spreads(node):
    """Every figure in a result."""
    if isinstance(node, dict) and set(node) == SPREAD:
        yield node
    elif isinstance(node, dict | list):
        for child in node.values() if isinstance(node, dict) else node:
            yield from spreads(child)


def test_every_case_has_every_part_on_every_place(result):
    cases = [(r["drafter"], r["batch"], r["budget"], r["together"]) for r in result["rounds"]]
    assert cases == [
        ("oracle", 1, 16, False),
        ("oracle", 2, 16, False),
        ("ngram", 1, 16, False),
        ("ngram", 2, 16, False),
        ("ngram", 1, 16, True),
    ]
    for r in result["rounds"]:
        assert set(r["parts"]) == set(PARTS)
        assert list(r["places"]) == list(result["wire"]) == ["in-process", "1 worker"]
        assert all(set(place) == set(BY_PLACE) for place in r["places"].values())
        # 2 visits of 2 rounds, and of what both places have in common twice as many.
        assert {place["round"]["n"] for place in r["places"].values()} == {4} and r["parts"]["build"]["n"] == 8
    assert set(result["tiny_model"]["tp 1"]) == set(STAGES)


def test_figures_are_of_samples(result):
    figures = list(spreads(result))
    assert len(figures) > 50
    assert all(f["n"] > 0 and 0 < f["p10"] <= f["median"] <= f["p90"] for f in figures), figures
    one, two = (r["parts"]["bytes"]["median"] for r in result["rounds"][:2])
    assert one < two and {r["parts"]["nodes"]["median"] for r in result["rounds"]} == {16}


def test_tables_show_every_case(result):
    text = show(result)
    rows = [line.split() for line in text.splitlines()]
    assert sum(row[:3] == ["oracle", "1", "16"] for row in rows) == 3, text
    assert sum(row[:4] == ["ngram", "together", "1", "16"] for row in rows) == 3, text
    assert all(len(line) <= 120 for line in text.splitlines()), text
