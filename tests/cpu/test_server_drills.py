"""Faults that clients meet through HTTP as a pause, and clients that leave nothing: scripts/drill_serve.py and
scripts/soak_serve.py in short."""

import pytest

from scripts.drill_serve import drills
from scripts.soak_serve import soak
from tests.service import Service

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


def test_many_that_do_not_fit_change_no_text(small):
    body = {"max_tokens": 80, "temperature": 0.8, "seed": 3, "ignore_eos": True}
    prompts = [[*range(20 + i, 75 + i)] for i in range(6)]  # three pages each in the end, of ten
    alone = [small.post("/v1/completions", prompt=prompt, **body)["choices"][0]["text"] for prompt in prompts]
    together = small.post("/v1/completions", prompt=prompts, **body)
    assert [choice["text"] for choice in together["choices"]] == alone
    assert together["usage"]["kdtp"]["preemptions"] > 0, together["usage"]


def test_random_ends_leave_nothing(small):
    first, last = soak(small, 96, 24, parts=2)
    assert last["files"] <= first["files"] + 4 and last["threads"] <= first["threads"] + 2
