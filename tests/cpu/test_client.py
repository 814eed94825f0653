"""The client of endpoints against servers that answer well and badly; the figures of a load."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.bench.figures import quantile, summary
from kdtp.bench.load import Load, Record, run
from kdtp.client import Endpoint, EndpointError, read_key

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = [{"choices": [{"index": 0, "text": "a\u2028ü"}]}, {"choices": [], "usage": {"completion_tokens": 2}}]


def stream(events=EVENTS, end=b"data: [DONE]\n\n") -> bytes:
    return b": ping\n\n" + b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + end


def chunked(data: bytes, cuts) -> bytes:
    places = [0, *sorted(cut % len(data) for cut in cuts), len(data)]
    pieces = [data[a:b] for a, b in pairwise(places) if a < b]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@asynccontextmanager
async def answering(data: bytes, asked: list[bytes] | None = None, silence: float = 5.0):
    """A server that says the same to everybody, and an Endpoint for it."""

    async def answer(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        if asked is not None:
            asked.append(head)
        writer.write(data)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/", "the-key", silence)


async def events_of(endpoint: Endpoint) -> list[dict]:
    return [event async for event in endpoint.stream("/v1/completions", {})]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 500), max_size=8))
def test_events_do_not_depend_on_how_they_are_cut(cuts):
    async def main():
        async with answering(HEAD + chunked(stream(), cuts)) as endpoint:
            return await events_of(endpoint)

    assert asyncio.run(main()) == EVENTS


def test_what_is_asked_and_a_whole_answer():
    async def main():
        asked: list[bytes] = []
        data = b'HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n{"a": 1}'
        async with answering(data, asked) as endpoint:
            return await endpoint.get("/v1/models"), await endpoint.post("/tokenize", {"x": 1}), asked

    got, posted, (first, second) = asyncio.run(main())
    assert got == posted == {"a": 1}
    assert first.startswith(b"GET /v1/models HTTP/1.1\r\n") and b"Authorization: Bearer the-key\r\n" in first
    assert second.startswith(b"POST /tokenize ") and b"Content-Length: 7\r\n" in second


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "broke off"),
        (b"SSH-2.0-x\r\n", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 1\r\n\r\nx", "no stream of events"),
        (HEAD + chunked(stream(), [])[:-20], "broke off"),
        (HEAD + chunked(stream([{"error": {"message": "engine died"}}]), []), "engine died"),
        (
            b'HTTP/1.1 503 No\r\nContent-Length: 35\r\n\r\n{"error": {"message": "not ready"}}',
            r"ready \(HTTP 503",
        ),
        (b"HTTP/1.1 502 Bad\r\nContent-Length: 3\r\n\r\n<h>", "no JSON"),
    ],
)
def test_a_bad_answer_is_told(data, problem):
    async def main():
        async with answering(data) as endpoint:
            await events_of(endpoint)

    with pytest.raises(EndpointError, match=problem):
        asyncio.run(main())


def test_silence_has_an_end_and_nobody_there_is_told():
    async def main():
        server = await asyncio.start_server(lambda reader, writer: asyncio.sleep(5), "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(EndpointError, match="broke off"):
                await Endpoint(f"http://127.0.0.1:{port}", silence=0.2).get("/health")
        with pytest.raises(EndpointError, match="cannot be reached"):
            await Endpoint(f"http://127.0.0.1:{port}").get("/health")

    asyncio.run(main())


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://x", "http://", "http://x/?key=1"])
def test_an_url_that_is_none(url):
    with pytest.raises(ValueError, match="--url"):
        Endpoint(url)


def test_where_the_key_comes_from(tmp_path, monkeypatch):
    monkeypatch.setenv("KDTP_API_KEY", "from-the-environment")
    assert read_key(None) == "from-the-environment"
    (tmp_path / "key").write_text("from-a-file\nanother\n")
    assert read_key(tmp_path / "key") == "from-a-file"
    (tmp_path / "empty").write_text("\n")
    for name in ("empty", "missing"):
        with pytest.raises(ValueError, match=name):
            read_key(tmp_path / name)


def test_a_load_is_the_same_for_a_seed_and_keeps_its_limits():
    load = Load("m", requests=30, prompt_tokens=(5, 9), max_tokens=(2, 4), vocab_size=50, shared=3)
    bodies = list(load.bodies())
    assert bodies == list(load.bodies()) and {len(b["prompt"]) for b in bodies} == {5, 6, 7, 8, 9}
    assert {b["max_tokens"] for b in bodies} == {2, 3, 4} and len({tuple(b["prompt"][:3]) for b in bodies}) == 1
    texts = Load("m", requests=3, texts=("a", "b"), speculate=False)
    assert [(b["prompt"], b["speculate"]) for b in texts.bodies()] == [("a", False), ("b", False), ("a", False)]

    async def main():
        async with answering(HEAD + chunked(stream(), [])) as endpoint:
            return await run(endpoint, Load("m", requests=9, concurrency=2, rate=500.0, vocab_size=9))

    records = asyncio.run(main())
    assert [r.error for r in records] == [""] * 9 and all(0 < r.due <= r.sent <= r.times[0] <= r.ended for r in records)
    assert sorted(r.due for r in records) == [r.due for r in records] and sum(r.tokens for r in records) == 18


def test_figures_by_hand():
    cost = {"rounds": 4, "committed": 6, "drafted_by_depth": [4, 2], "accepted_by_depth": [2, 0]}
    more = {"rounds": 1, "committed": 4, "drafted_by_depth": [1, 1, 1], "accepted_by_depth": [1, 1, 1]}
    records = [
        Record(0.0, 0.0, [0.5, 0.6, 1.0], 1.0, {"completion_tokens": 11, "prompt_tokens": 3, "kdtp": cost}),
        Record(1.0, 1.5, [2.0], 2.0, {"completion_tokens": 1, "prompt_tokens": 4, "kdtp": more}),
        Record(1.0, 1.0, [], 1.5, {}, "HTTP 500"),
    ]
    found = summary(records)
    assert found["failed"] == {"HTTP 500": 1} and found["seconds"] == 2.0 and found["tokens_per_second"] == 6.0
    assert found["first_text_ms"] == {"p50": 750.0, "p90": 950.0, "p99": 995.0}, "from when it was due"
    assert found["per_token_ms"]["p50"] == 50.0 and found["gap_ms"]["p50"] == 250.0
    assert found["tokens_per_round"] == 2.0 and found["acceptance_by_depth"] == [0.6, round(1 / 3, 4), 1.0]
    assert summary([])["tokens_per_second"] == 0.0 and quantile([], 50) == 0.0


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_a_quantile_lies_among_the_values_and_rises(values, percent):
    found = quantile(values, percent)
    assert min(values) <= found <= max(values) and quantile(values, 0) == min(values)
    assert found <= quantile(values, 100) == max(values)


ODD_EVENTS = (
    b"{nope",
    b"[1]",
    b'{"choices": "x"}',
    b'{"choices": [{"delta": 5}]}',
    b'{"choices": [{"delta": {"content": 5}}]}',
    b'{"usage": {"completion_tokens": "many"}}',
)


@pytest.mark.parametrize("event", ODD_EVENTS)
def test_an_event_that_is_none_fails_its_request_and_no_other(event):
    """A load ends, although the next request waits for the place of this one."""
    data = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: " + event + b"\n\n"

    async def main():
        async with answering(data) as endpoint, asyncio.timeout(5):
            return await run(endpoint, Load("m", requests=3, concurrency=1, vocab_size=9))

    records = asyncio.run(main())
    assert len(records) == 3 and all("/v1/completions: cannot be understood: " in r.error for r in records)


@pytest.mark.parametrize("body", [b"{}", b"[1]", b'{"data": []}', b'{"data": [{}]}'])
def test_an_endpoint_that_tells_no_model(body):
    async def main():
        async with answering(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body) as endpoint:
            await endpoint.model()

    with pytest.raises(EndpointError, match="/v1/models: tells no model: "):
        asyncio.run(main())


def test_what_an_endpoint_says_is_nothing_that_a_terminal_obeys():
    assert str(EndpointError("a\x1b[31m\x07\u202eé")) == r"a\x1b[31m\x07\u202eé"


@pytest.mark.parametrize("key", ["a\nb", "a b", "ключ"])
def test_a_key_that_cannot_be_sent(monkeypatch, key):
    monkeypatch.setenv("KDTP_API_KEY", key)
    with pytest.raises(ValueError, match=r"^\$KDTP_API_KEY: must be printable ASCII"):
        read_key(None)
