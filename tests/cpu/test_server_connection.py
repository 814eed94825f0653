"""Connections that are too slow, too many or no HTTP; the names a server may be called by."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from contextlib import asynccontextmanager

import pytest
import uvicorn

from kdtp.server import connection
from kdtp.server.gate import Gate
from kdtp.server.run import Settings, _config, _hosts, bind

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving(hosts=None, answered_by=app):
    """uvicorn as `kdtp serve` sets it up, before a trivial application; its port."""
    server = uvicorn.Server(_config(Gate(answered_by, (), hosts)))
    bound = bind("127.0.0.1", 0)
    task = asyncio.create_task(server._serve([bound]))
    while not server.started:
        await asyncio.sleep(0.01)
    yield bound.getsockname()[1]
    server.should_exit = True
    await task


async def answer(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """All that comes until the server closes, after some bytes; or what came within 20 s."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    got = b""
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause)
        async with asyncio.timeout(20):
            while data := await reader.read(4096):
                got += data
    except (TimeoutError, ConnectionError):
        pass
    finally:
        writer.close()
    return got


def error(data: bytes) -> dict:
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return json.loads(body)["error"]


def test_headers_that_do_not_come(monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT", 0.3)

    async def main():
        async with serving() as port:
            silent, half = await asyncio.gather(answer(port), answer(port, GET[:-2]))
            # One byte now and then is no progress; a second request on a connection has a deadline of its own.
            dripping, second = await asyncio.gather(
                answer(port, *(GET[i : i + 1] for i in range(5)), pause=0.05), answer(port, GET, GET[:5], pause=0.05)
            )
            monkeypatch.setattr(connection, "HEAD_TIMEOUT", 20.0)
            well = await answer(port, GET[:10], GET[10:-2] + b"Connection: close\r\n\r\n", pause=0.1)
            return silent, half, dripping, second, well

    silent, half, dripping, second, well = asyncio.run(main())
    for said in (silent, half, dripping):
        assert said.startswith(b"HTTP/1.1 408 ") and error(said)["code"] == "timeout"
    assert second.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in second
    assert well.startswith(b"HTTP/1.1 200 ") and well.endswith(b"ok")


def test_an_answer_that_is_not_read(monkeypatch):
    monkeypatch.setattr(connection, "READ_TIMEOUT", 0.3)
    gone = []

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone:
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            with contextlib.suppress(TimeoutError):
                if (await asyncio.wait_for(receive(), 0.001))["type"] == "http.disconnect":
                    gone.append(True)

    async def main():
        async with serving(answered_by=endless) as port:
            _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)  # reads next to nothing
            writer.write(GET)
            async with asyncio.timeout(20):
                while not gone:
                    await asyncio.sleep(0.02)
            # One that reads slowly is served on.
            gone.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1)
            writer.write(GET)
            for _ in range(100):
                await reader.read(1 << 20)
                await asyncio.sleep(0.01)
            assert not gone
            writer.close()

    asyncio.run(main())


def test_more_connections_than_there_may_be(monkeypatch):
    monkeypatch.setattr(connection, "MOST_CONNECTIONS", 3)

    async def main():
        async with serving() as port:
            idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            await asyncio.sleep(0.05)
            refused = await answer(port, GET)
            for _, writer in idle:
                writer.close()
            await asyncio.sleep(0.05)
            return refused, await answer(port, GET[:-2] + b"Connection: close\r\n\r\n")

    refused, well = asyncio.run(main())
    assert refused.startswith(b"HTTP/1.1 503 ") and error(refused)["code"] == "overloaded"
    assert b"Retry-After: 1\r\n" in refused and well.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX y: z\r\n\r\n",
        b"GET /" + b"x" * 600_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_in_the_form_of_all_errors(data):
    async def main():
        async with serving() as port:
            return await answer(port, data), await answer(port, GET[:-2] + b"Connection: close\r\n\r\n")

    said, well = asyncio.run(main())
    assert said.startswith(b"HTTP/1.1 400 ") and error(said)["code"] == "bad_http"
    assert well.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("body", [b"-1\r\n", b"2\r\n{}{}\r\n0\r\n\r\n"])
def test_a_body_that_is_no_http(body):
    async def wants_it(scope, receive, send):
        while (await receive())["type"] != "http.disconnect":
            pass

    async def main():
        async with serving(answered_by=wants_it) as port:
            return await answer(port, GET[:-2] + b"Transfer-Encoding: chunked\r\n\r\n", body, pause=0.05)

    said = asyncio.run(main())
    assert said.startswith(b"HTTP/1.1 400 ") and error(said)["code"] == "bad_http"


@pytest.mark.parametrize(
    ("headers", "status", "words"),
    [
        (b"Content-Length: 2\r\nTransfer-Encoding: chunked", b"400", "must not both be there"),
        (b"Content-Length: 99999999999999999999", b"413", "more than 8388608 bytes"),  # known before any of it comes
        (b"Content-Length: 999999999999999999999", b"400", "no HTTP/1.1 request"),
    ],
)
def test_bodies_that_are_refused_by_their_head(headers, status, words):
    async def main():
        async with serving() as port:
            return await answer(port, b"POST / HTTP/1.1\r\nHost: localhost\r\n%s\r\n\r\n" % headers)

    said = asyncio.run(main())
    assert said.split(b" ")[1] == status and words in error(said)["message"]


@pytest.mark.parametrize("more", [b"", b"Connection: close\r\n"])
def test_who_sends_too_much_is_told_so(more):
    """Not that the connection broke: the answer comes first, but only then does the client read."""

    async def main():
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\n%sContent-Length: 50000000\r\n\r\n" % more)
            for _ in range(50):
                writer.write(b" " * 1_000_000)
                await writer.drain()
            said = await reader.read()
            writer.close()
            return said

    assert "more than 8388608 bytes" in error(asyncio.run(main()))["message"]


def test_who_goes_on_sending_is_cut_off(monkeypatch):
    monkeypatch.setattr(connection, "REST_TIMEOUT", 0.3)

    async def main():
        async with serving() as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n")
            said, began = await reader.read(), time.monotonic()
            with contextlib.suppress(ConnectionError):
                while time.monotonic() < began + 5:
                    writer.write(b" ")
                    await writer.drain()
                    await asyncio.sleep(0.02)
            writer.close()
            return said, time.monotonic() - began

    said, seconds = asyncio.run(main())
    assert b" 413 " in said and 0.2 < seconds < 4


def test_who_wants_a_web_socket_is_answered_and_nobody_is_told_to_install_one(caplog):
    async def main():
        async with serving() as port:
            upgrade = b"Upgrade: websocket\r\nSec-WebSocket-Key: eA==\r\nConnection: Upgrade"
            last = GET[:-2] + b"Connection: close\r\n\r\n"
            return await answer(port, GET[:-2] + upgrade + b"\r\n\r\n" + last)

    assert asyncio.run(main()).count(b"HTTP/1.1 200 ") == 2
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_a_head_that_comes_whole_but_is_too_long():
    async def main():
        async with serving() as port:
            long = b"X-Long: " + b"x" * 70_000 + b"\r\nConnection: close\r\n\r\n"
            return await answer(port, GET[:-2] + long)

    assert asyncio.run(main()).startswith(b"HTTP/1.1 431 ")


def test_the_names_it_may_be_called_by():
    with bind("127.0.0.1", 0) as bound:
        names = _hosts(bound, Settings(hosts=("my.name",)))
    assert names is not None and {"localhost", "127.0.0.1", "[::1]", "my.name"} == names
    with socket.socket() as everywhere:
        everywhere.bind(("", 0))
        assert _hosts(everywhere, Settings()) is None
        assert "my.name" in (_hosts(everywhere, Settings(hosts=("my.name",))) or ())

    async def main():
        async with serving(names) as port:
            said = {}
            for host in (
                "localhost",
                "LOCALHOST:8000",
                "[::1]:80",
                "my.name",
                "evil.example:8000",
                "localhost.evil",
                "",
            ):
                request = b"GET / HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n" % host.encode()
                said[host] = await answer(port, request)
            return said

    said = asyncio.run(main())
    status = {host: data.split(b" ")[1] for host, data in said.items()}
    assert [status[h] for h in ("localhost", "LOCALHOST:8000", "[::1]:80", "my.name")] == [b"200"] * 4
    assert [status[h] for h in ("evil.example:8000", "localhost.evil", "")] == [b"403"] * 3
    assert json.loads(said["evil.example:8000"].partition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_host"
