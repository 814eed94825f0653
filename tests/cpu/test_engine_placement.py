"""Where the coordinator lives: the same text and the same ends in a process of its own and in that of worker 0."""

import time

import pytest

from kdtp.config import ConfigError, EngineConfig
from kdtp.messages import Failed, Finished
from kdtp.types import SamplingParams
from tests.processes import TINY, Running, collect, until

LONG = SamplingParams(max_tokens=490, ignore_eos=True)
WAYS = [(1, "process", 3), (2, "process", 4), (2, "worker0", 3)]  # ranks, place, processes with the launcher
pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("placement")]


@pytest.mark.parametrize(("tp", "place", "processes"), WAYS)
def test_the_golden_tokens_and_an_orderly_end(tmp_path, tp, place, processes):
    from kdtp.engine.plan import plan

    golden = plan(EngineConfig(str(TINY))).golden
    with Running(tmp_path, "--coordinator", place, "--drafter", "oracle", tp=tp) as engine:
        tokens, end = collect(engine.client, engine.client.submit(golden.prompt, SamplingParams(max_tokens=24)))
        assert tokens == list(golden.tokens) and isinstance(end, Finished)
        assert len(engine.family()) == processes
        engine.client.shutdown()
        assert engine.end(5.0) == 0
        until(lambda: not engine.left(), 5, "no process left")


@pytest.mark.parametrize("stop", [False, True])
def test_a_peer_of_the_hosted_worker_is_killed_or_stopped(tmp_path, stop):
    flags = ("--coordinator", "worker0", "--step-timeout", 1.5)
    with Running(tmp_path, *flags) as engine:
        request = engine.client.submit((1, 2, 3), LONG)
        until(lambda: engine.status().step > 4, 20, "steps")
        victim = engine.find("worker", 1)
        victim.suspend() if stop else victim.kill()
        began = time.monotonic()
        _, end = collect(engine.client, request)
        assert isinstance(end, Failed) and f"rank 1 (pid {victim.pid}" in end.message
        assert time.monotonic() - began < (4.0 if stop else 2.0)
        assert engine.end(8.0) == 70
        until(lambda: not engine.left(), 5, "no process left")


def test_a_place_that_there_is_not():
    with pytest.raises(ConfigError, match="coordinator = 'gpu': must be one of auto, process, worker0"):
        EngineConfig("m", coordinator="gpu")
