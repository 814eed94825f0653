"""Faults that clients meet through HTTP as a pause, and clients that leave nothing: scripts/drill_serve.py and
scripts/soak_serve.py in short."""

import re

import pytest

from scripts.drill_serve import drills
from scripts.soak_serve import soak
from tests.service import Reader, Service

pytestmark = [pytest.mark.xdist_group("server-drills"), pytest.mark.timeout(180)]

# Of each kind of fault one, each in another phase; kills while decoding are test_server_recovery's.
PAIRS = (
    ("coordinator stopped", "prefill"),
    ("worker raises", "drain"),
)


def test_streams_go_on_whatever_stops(tmp_path):
    told = []
    drills(tmp_path, 2, PAIRS, lambda *line: told.append(line))
    assert [line[:2] for line in told] == list(PAIRS)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A server with ten pages, so that many at once do not fit."""
    flags = ("--drafter", "ngram", "--kv-tokens", 640, "--log-level", "warning")
    with Service(tmp_path_factory.mktemp("small"), *flags) as running:
        yield running


def test_a_storm_that_does_not_fit_changes_no_text(small):
    bodies = [
        {"prompt": [*range(20 + i, 75 + i)], "max_tokens": 100, "temperature": 0.8 * (i % 2), "seed": i}
        for i in range(8)
    ]
    alone = []
    for body in bodies:
        alone.append(Reader(small, body))
        alone[-1].join(60)
    together = [Reader(small, body) for body in bodies]
    for reader, truth in zip(together, alone, strict=True):
        reader.join(90)
        assert reader.error is None and reader.reasons() == ["length"] and reader.text == truth.text
    metrics = small.call("GET", "/metrics")[1]
    assert int(re.search(r"^kdtp:num_preemptions_total (\d+)", metrics, re.MULTILINE)[1]) > 0


def test_random_ends_leave_nothing(small):
    first, last = soak(small, 160, 24, parts=2)
    assert last["files"] <= first["files"] + 4 and last["threads"] <= first["threads"] + 2
