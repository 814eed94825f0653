"""Jobs across engines, without one; and what becomes of an answer's tokens, however they come."""

from __future__ import annotations

import asyncio
import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionChunk

from kdtp.messages import Failed, Finished, Refused, Scored, Tokens, Usage
from kdtp.server.choice import Choice, Grown
from kdtp.server.driver import Driver, Health
from kdtp.server.errors import invalid, of_terminal
from kdtp.server.forms import ChatForm
from kdtp.server.journal import Job
from kdtp.server.session import Session
from kdtp.server.watcher import Watcher
from kdtp.text.calls import DEEPSEEK_V31, AnswerParser
from kdtp.text.tokenizer import load
from kdtp.types import Logprob, SamplingParams
from kdtp.watch import Round
from tests.paths import REFS

TOKENIZER = load(REFS / "tiny_text")
CONTEXT = 20
ENGINE_DIED = Failed(1, "engine", "rank 0 ended")


class FakeClient:
    """As rpc.Client, with events that the test puts there."""

    def __init__(self) -> None:
        self.submitted: list[tuple[int, list[int]]] = []
        self.cancelled: list[int] = []
        self.watched: list[tuple[int, int]] = []
        self.waiting: list[tuple[int, object, None]] = []

    def submit(self, prompt, params, speculate, budget, priority, salt, given) -> int:
        self.submitted.append((len(self.submitted) + 1, list(given)))
        return len(self.submitted)

    def cancel(self, label: int) -> None:
        self.cancelled.append(label)

    def forget(self, label: int) -> None:
        pass

    def watch(self, label: int, rounds: int) -> None:
        self.watched.append((label, rounds))

    def poll(self, labels, seconds):
        got = [event for event in self.waiting if event[0] in labels]
        self.waiting = [event for event in self.waiting if event[0] not in labels]
        return got


class Bench:
    """One job in a session over a FakeClient."""

    def __init__(self, **more) -> None:
        self.told: list[object] = []
        params = SamplingParams(max_tokens=more.pop("max_tokens", 8), min_tokens=more.pop("min_tokens", 0))
        self.job = Job((1, 2, 3), params, self.told.append, **more)
        self.wanted = {self.job: None}
        self.begin()

    def begin(self) -> None:
        """Another engine."""
        self.client = FakeClient()
        self.session = Session(self.client, self.wanted, CONTEXT, lambda job, event: job.tell(event))
        self.session.start(self.job)

    def hear(self, *events) -> None:
        self.client.waiting += [(self.job.label, event, None) for event in events]
        self.session.turn(0)


def test_a_job_goes_on_in_the_next_engine():
    bench = Bench()
    bench.hear(Tokens(1, 0, (5, 6)), Tokens(1, 2, (7,)), ENGINE_DIED)
    assert bench.session.fault == "rank 0 ended"
    bench.begin()
    assert bench.client.submitted == [(1, [5, 6, 7])]
    bench.hear(Tokens(1, 3, (8,)), Finished(1, "length", Usage()))
    assert [e.tokens for e in bench.told[:-1]] == [(5, 6), (7,), (8,)]
    assert [e.position for e in bench.told[:-1]] == [0, 2, 3] and isinstance(bench.told[-1], Finished)


def test_what_was_told_is_not_told_again():
    bench = Bench(ends={99})
    some = [Logprob(t, -1.0, 1, ()) for t in (5, 6, 7)]
    bench.hear(Scored(1, 1, (some[0],)), Tokens(1, 0, (5, 6), tuple(some[:2])))
    bench.begin()
    bench.hear(Scored(1, 1, tuple(some[:2])), Tokens(1, 1, (6, 7), tuple(some[1:])))
    assert bench.told[2] == Scored(1, 2, (some[1],))
    assert bench.told[3] == Tokens(1, 2, (7,), (some[2],)) and bench.job.given == [5, 6, 7]


def test_a_hole_is_asked_for_again():
    bench = Bench()
    bench.hear(Tokens(1, 0, (5,)))
    bench.hear(Tokens(1, 2, (7,)))
    assert bench.told == [Tokens(1, 0, (5,))] and bench.client.cancelled == [1]
    assert bench.client.submitted[1:] == [(2, [5])]


@pytest.mark.parametrize(
    ("given", "more", "reason"),
    [
        ((5, 6, 7), {"max_tokens": 3}, "length"),
        ((5, 9), {"ends": {9}}, "stop"),
        (tuple(range(18)), {"max_tokens": 90}, "length"),
        ((5, 9), {"ends": {9}, "min_tokens": 2}, None),
        (tuple(range(17)), {"max_tokens": 90}, None),
    ],
)
def test_an_end_that_was_not_told_any_more(given, more, reason):
    bench = Bench(**more)
    bench.hear(Tokens(1, 0, given))
    bench.begin()
    if reason is None:
        assert len(bench.client.submitted) == 1 and len(bench.told) == 1
    else:
        assert not bench.client.submitted and bench.told[-1].reason == reason
        assert bench.told[-1].usage.completion_tokens == len(given)


def test_what_an_engine_took_the_next_one_may_only_delay(monkeypatch):
    refused = Refused(1, "256 wait", 0.0)
    bench = Bench()
    bench.hear(refused)
    assert bench.told == [refused], "a new one"
    bench = Bench()
    bench.hear(Tokens(1, 0, (5,)))
    bench.begin()
    bench.hear(refused)
    assert bench.told == [Tokens(1, 0, (5,))]
    monkeypatch.setattr("kdtp.server.session.time.monotonic", lambda: 1e9)
    bench.session.turn(0)
    assert bench.client.submitted == [(1, [5]), (2, [5])]


def test_what_nobody_wants_is_not_started():
    bench = Bench()
    bench.hear(Tokens(1, 0, (5,)))
    bench.wanted.clear()
    bench.session.cancel(bench.job)
    assert bench.client.cancelled == [1]
    bench.begin()
    assert not bench.client.submitted


def test_a_job_that_engines_may_die_of_ends_before_the_service_does():
    told: dict[str, list] = {"old": [], "new": [], "waiting": []}
    gave_up = []

    async def run():
        driver = Driver(None, 3, 60.0, lambda: gave_up.append(True))
        jobs = {name: Job((1,), SamplingParams(), heard.append) for name, heard in told.items()}
        driver._jobs = dict.fromkeys(jobs.values())
        for death in range(4):
            for name in ("old", *(["new"] if death == 2 else [])):
                jobs[name].label = 1
            driver._die("bang")
            await asyncio.sleep(0)
            assert bool(told["old"]) == (death >= 2) and bool(gave_up) == (death == 3)
        return driver.health

    health = asyncio.run(run())
    (failed,) = told["old"]
    assert "3 engines died with this request open: bang" in failed.message and not told["new"] + told["waiting"]
    assert health.state == "dead" and health.restarts == 4


def test_a_figure_that_cannot_be_counted_ends_nothing(monkeypatch, caplog):
    told: list = []

    async def run():
        driver = Driver(None, 3, 60.0, lambda: None)
        driver._health = Health("ready")
        for name in ("begun", "told", "ended"):
            monkeypatch.setattr(driver.metrics, name, lambda *given: 1 / 0)
        job, left = (Job((1,), SamplingParams(), told.append) for _ in range(2))
        for each in (job, left):
            driver.submit(each)
        driver._deliver([(job, Tokens(1, 0, (5,))), (job, Finished(1, "stop", Usage()))])
        driver.cancel(left)
        assert driver.open == 0

    asyncio.run(run())
    assert [type(event) for event in told] == [Tokens, Finished]
    assert caplog.text.count("a metric could not be counted") == 5


@pytest.mark.parametrize(
    ("event", "status", "param"),
    [
        (Failed(1, "invalid", "stop_tokens[0] = 900: must be in [0, 512)"), 400, "stop_token_ids"),
        (Failed(1, "no_token", "logits hold NaN"), 500, None),
        (Failed(1, "shutdown", "told to end"), 503, None),
        (Refused(1, "256 wait", 2.2), 503, None),
    ],
)
def test_ends_as_errors(event, status, param):
    error = of_terminal(event, "response_format")
    assert (error.status, error.param) == (status, param) and set(error.body()) == {"error"}
    again = {Refused: "3", Failed: "10"}[type(event)]
    assert error.headers == ({"Retry-After": again} if status == 503 else {})
    assert invalid(ValueError("no name here")).param is None


def answer_ids() -> list[int]:
    """Thought, text and two calls, as DeepSeek-V3.1 writes them."""
    names = TOKENIZER.controls
    call, sep, end = (names[f"<｜tool▁{n}｜>"] for n in ("call▁begin", "sep", "call▁end"))
    text = TOKENIZER.encode
    return [
        *text("Hm, 世界"),
        names["</think>"],
        *text("I look."),
        names["<｜tool▁calls▁begin｜>"],
        *(call, *text("look"), sep, *text('{"at": "Zürich"}'), end),
        *(call, *text("add"), sep, *text("{}"), end),
        names["<｜tool▁calls▁end｜>"],
    ]


def grown(ids: list[int], cuts: list[int]) -> list[Grown]:
    names = iter(("call_a", "call_b"))
    parser = AnswerParser(TOKENIZER, DEEPSEEK_V31, thinking=True, new_id=lambda: next(names))
    choice = Choice(TOKENIZER, (), (), parser)
    edges = [0, *sorted(set(cuts)), len(ids)]
    parts = [choice.take(Tokens(1, a, tuple(ids[a:b]))) for a, b in pairwise(edges) if a < b]
    return [*parts, choice.end("stop")]


@given(st.lists(st.integers(0, len(answer_ids())), max_size=20))
def test_tool_calls_whole_and_streamed_however_tokens_are_grouped(cuts):
    parts = grown(answer_ids(), cuts)
    whole, streamed = ChatForm(TOKENIZER, 1, False), ChatForm(TOKENIZER, 1, False)
    for part in parts:
        whole.keep(0, part)
    (choice,) = whole.choices()
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert (message["reasoning_content"], message["content"]) == ("Hm, 世界", "I look.")
    calls = [(c["id"], c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message["tool_calls"]]
    assert calls == [("call_a", "look", {"at": "Zürich"}), ("call_b", "add", {})]

    arguments = {0: "", 1: ""}
    content, reasons = "", []
    for found in [c for part in parts for c in streamed.chunks(0, part)]:
        head = {"id": "x", "object": "chat.completion.chunk", "created": 0, "model": "m"}
        typed = ChatCompletionChunk.model_validate({**head, "choices": [found]}).choices[0]
        content += typed.delta.content or ""
        reasons += [typed.finish_reason] if typed.finish_reason else []
        for call in typed.delta.tool_calls or ():
            arguments[call.index] += call.function.arguments
    assert arguments == {i: c["function"]["arguments"] for i, c in enumerate(message["tool_calls"])}
    assert content == "I look." and reasons == ["tool_calls"]


ROUND = Round(1, 0, (5, 6), (-1, 0), (0.0, -0.5), (0, 1), 7, {})


def test_rounds_are_asked_for_as_long_as_somebody_looks_and_in_the_next_engine_too():
    bench = Bench()
    bench.hear(ROUND)  # asked for by nobody any more
    assert bench.client.watched == []
    watcher = Watcher()
    bench.job.watchers.append(watcher)
    bench.session.watch(bench.job)
    assert bench.client.watched == [(1, 16)]
    bench.hear(*[ROUND] * 7)
    assert len(bench.client.watched) == 1
    bench.hear(ROUND)
    assert bench.client.watched == [(1, 16)] * 2, "before they are used up"
    bench.begin()
    assert bench.client.watched == [(1, 16)], "the next engine knows nothing"
    bench.job.watchers.clear()
    bench.hear(*[ROUND] * 12)
    assert len(bench.client.watched) == 1, "nobody looks"


def test_a_slow_watcher_sees_the_newest_and_how_many_it_missed():
    async def main():
        watcher = Watcher()
        for _ in range(20):
            watcher.show(ROUND)
        seen = []
        async for found in watcher.rounds(0.01):
            seen.append(found and found[0])
            if found is None:
                watcher.end()
        return seen

    assert asyncio.run(main()) == [*range(13, 21), None]
