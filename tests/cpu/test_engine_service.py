"""What clients of a running engine see of its queue, its prefix cache and log-probabilities."""

from __future__ import annotations

import pytest

from kdtp.config import EngineConfig
from kdtp.engine.api import Engine
from kdtp.engine.rpc import EngineBusy
from kdtp.messages import Failed, Finished, Refused, Scored, Tokens
from kdtp.types import SamplingParams
from tests.processes import TINY, Running, collect, until

LONG = SamplingParams(max_tokens=490, ignore_eos=True)
pytestmark = pytest.mark.timeout(120)


def test_over_the_wire(tmp_path):
    """One engine process: limits, cache, priorities, scores."""
    with Running(tmp_path, "--max-queue", 2, "--max-batch", 1, tp=1) as engine:
        client = engine.client
        running = client.submit((1, 2), LONG)
        until(lambda: engine.status().running == 1, 20, "running")
        low = client.submit((3,) * 70, SamplingParams(max_tokens=2))
        high = client.submit((4,), SamplingParams(max_tokens=2), priority=1)
        refused = client.submit((5,), LONG)
        until(lambda: engine.status().waiting == 2, 20, "waiting")  # status goes by a connection of its own
        status = engine.status()
        assert (status.running, status.waiting, status.waiting_tokens) == (1, 2, 71)
        ((end, _),) = client.events(refused)
        assert isinstance(end, Refused) and "max_queue 2" in end.reason and 0.1 <= end.retry_after <= 60
        client.cancel(running)
        order = [
            label for label, message, _ in client.any_events([running, low, high]) if isinstance(message, Finished)
        ]
        assert order == [running, high, low]

        bad = client.submit((3,), SamplingParams(), budget=10**6)
        assert isinstance(collect(client, bad)[1], Finished)  # more than the engine's is the engine's
        for salt, cached in (("", 64), ("mine", 0), ("mine", 64)):
            _, end = collect(client, client.submit((3,) * 70, SamplingParams(max_tokens=1), salt=salt))
            assert end.usage.cached_tokens == cached
        counters = engine.status().counters
        assert counters["prefix_hits"] == 128 and engine.status().pages_idle >= 2

        params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=1)
        messages = [m for m, _ in client.events(client.submit((3,) * 70, params))]
        scored = [known for m in messages if isinstance(m, Scored) for known in m.logprobs]
        told = [known for m in messages if isinstance(m, Tokens) for known in m.logprobs]
        assert len(scored) == 69 and all(known.token == 3 and len(known.best) == 1 for known in scored)
        assert len(told) == 3 and all(known.token == known.best[0][0] and known.rank == 1 for known in told)

        again = client.submit((6,), SamplingParams(max_tokens=1))
        assert collect(client, again)[1].reason == "length"
        empty = client.submit((9999,), SamplingParams())
        assert isinstance(collect(client, empty)[1], Failed)


def test_many_prompts_wait_for_room_in_the_queue():
    with Engine.of(EngineConfig(str(TINY), threads=1, max_queue=3, max_queue_tokens=20, max_batch=2)) as engine:
        prompts = [(1,) * 15, (2,) * 30, (3,), (4,) * 9, (5,) * 9, (6,) * 9]
        done = engine.generate(prompts, SamplingParams(max_tokens=3))
        assert [len(d.tokens) for d in done] == [3] * 6
        engine._backend.submit((1,) * 15, LONG, True, False, 0)
        with pytest.raises(EngineBusy, match="max_queue_tokens 20") as caught:
            engine.generate([(1,) * 6])
        assert caught.value.retry_after > 0


def test_completions_tell_logprobs():
    with Engine(str(TINY), drafter="ngram") as engine:
        (done,) = engine.generate([(5, 6) * 9], SamplingParams(max_tokens=9, logprobs=0, prompt_logprobs=3))
        assert [known.token for known in done.logprobs] == list(done.tokens)
        assert [known.token for known in done.prompt_logprobs] == list(done.prompt[1:])
        assert {len(known.best) for known in done.logprobs} == {0}
        assert {len(known.best) for known in done.prompt_logprobs} == {3}
