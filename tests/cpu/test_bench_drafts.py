"""bench_drafts: it runs every way, counts whole rounds, and sees a text that is not plain decoding's."""

from __future__ import annotations

import json

import pytest

from scripts import bench_drafts
from scripts.bench_drafts import Run, figures, main, show

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("bench-accept")]
WAYS = ["plain", "16, host", "16, device"]
FLAGS = ["--seqs", "2", "--tokens", "6", "--turns", "1", "--json", "--ways", *WAYS]


def test_ways_in_small(capsys):
    main(FLAGS)
    points = {point["way"]: point for point in json.loads(capsys.readouterr().out)}
    assert list(points) == WAYS
    assert points["plain"]["tokens_per_round"] == 1.0 and points["16, device"]["tokens_per_round"] > 1.0
    assert all(point["seqs"] == 2 and point["round_ms"] > point["verify_ms"] > 0 for point in points.values())
    assert len(show(list(points.values())).splitlines()) == 1 + len(points)


def test_medians_of_turns():
    stages = dict.fromkeys(("draft", "build", "verify", "accept", "commit"), 0.5)
    runs = [Run(rounds, 12, 1.5, stages) for rounds in (2, 3, 6)]
    found = figures(runs, 2)
    assert (found["tokens_per_round"], found["tokens_per_second"]) == (2.0, 8.0)
    assert (found["round_ms"], found["draft_ms"]) == (500.0, pytest.approx(166.6667))


def test_a_text_that_parts_is_seen(monkeypatch):
    run = bench_drafts.run

    def spoilt(engine, texts, tokens):
        found, written = run(engine, texts, tokens)
        return found, written if engine.config.drafter.shape != "chain" else [[*written[0][:-1], 5]]

    monkeypatch.setattr(bench_drafts, "run", spoilt)
    with pytest.raises(RuntimeError, match="chain, 1 sequences: a text is not plain decoding's"):
        main(["--seqs", "1", "--tokens", "4", "--ways", "chain"])
