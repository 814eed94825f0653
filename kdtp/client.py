"""A client of an OpenAI-style endpoint: enough of HTTP/1.1 and server-sent events to talk with one, and no more."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

KEY_VARIABLE = "KDTP_API_KEY"
_MOST_LINE = 1 << 20  # bytes of a header line, or of one event
_MOST_BODY = 64 << 20
_CONNECT = 10.0  # seconds


class EndpointError(RuntimeError):
    """The endpoint refused, failed, or could not be reached. status: of HTTP; 0 if there was none.

    What it says is not for the terminal to obey: control characters are escaped.
    """

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__("".join(c if c.isprintable() else repr(c)[1:-1] for c in message))
        self.status = status


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: dict[str, Any] | None = None
    kdtp: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None


class _Card(msgspec.Struct):
    id: str
    vocab_size: int | None = None


class _Cards(msgspec.Struct):
    data: Annotated[list[_Card], msgspec.Meta(min_length=1)]


def read_key(path: Path | None) -> str | None:
    """The first key in a file, or the one in the environment (KDTP_API_KEY). ValueError for a file without one, or for
    what cannot be sent."""
    if path is None:
        key = os.environ.get(KEY_VARIABLE)
        if key is not None and not re.fullmatch("[!-~]*", key):
            raise ValueError(f"${KEY_VARIABLE}: must be printable ASCII without spaces")
        return key
    try:
        lines = path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {path}: {error}") from None
    if not lines:
        raise ValueError(f"--api-key-file {path}: has no key")
    return lines[0]


class Endpoint:
    """Where it is, and what opens it. url: http or https, with or without /v1; silence: seconds it may say nothing.

    ValueError for an url that is none.
    """

    def __init__(self, url: str, key: str | None = None, silence: float = 120.0) -> None:
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ValueError(f"--url {url!r}: {error}; must be like http://127.0.0.1:8000") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise ValueError(f"--url {url!r}: must be like http://127.0.0.1:8000")
        self._host, self._tls = parts.hostname, parts.scheme == "https"
        self._port = port or (443 if self._tls else 80)
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        self._name = parts.netloc.rpartition("@")[2]
        self._key, self._silence = key, silence

    async def model(self) -> tuple[str, int]:
        """Name and vocabulary (0 if it is not said) of the first model. EndpointError."""
        try:
            card = msgspec.convert(await self.get("/v1/models"), _Cards).data[0]
        except msgspec.ValidationError as error:
            raise EndpointError(f"{self._name}/v1/models: tells no model: {error}") from None
        return card.id, card.vocab_size or 0

    async def get(self, path: str) -> Any:
        """The JSON of a path. EndpointError."""
        async with self._asked("GET", path, None) as (_, answer):
            return await _json(answer)

    async def post(self, path: str, body: object) -> Any:
        """The JSON that answers a body. EndpointError."""
        async with self._asked("POST", path, body) as (_, answer):
            return await _json(answer)

    async def stream(self, path: str, body: object) -> AsyncIterator[dict[str, Any]]:
        """The events that answer a body, as they come. EndpointError, also for one that is an error."""
        async with self._asked("POST", path, body) as (head, answer):
            if not head.get("content-type", "").startswith("text/event-stream"):
                raise EndpointError(f"{path}: answered with {head.get('content-type')!r}, no stream of events")
            async for line in _lines(answer):
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    event = msgspec.json.decode(data, type=dict[str, Any])
                    if "error" in event:
                        raise EndpointError(_message(event), 200)
                    msgspec.convert(event, _Event)
                    yield event

    @asynccontextmanager
    async def _asked(
        self, method: str, path: str, body: object
    ) -> AsyncIterator[tuple[dict[str, str], AsyncIterator[bytes]]]:
        """Head and body of one answer; the connection is closed behind it."""
        try:
            async with asyncio.timeout(_CONNECT):
                secure = ssl.create_default_context() if self._tls else None
                reader, writer = await asyncio.open_connection(self._host, self._port, ssl=secure, limit=_MOST_LINE)
        except (OSError, TimeoutError) as error:
            raise EndpointError(f"{self._name}: cannot be reached: {error or 'no answer'}") from None
        try:
            writer.write(self._request(method, path, body))
            await writer.drain()
            status, head = await self._head(reader)
            answer = self._pieces(reader, head)
            if status != 200:
                raise EndpointError(_message(await _json(answer), status), status)
            yield head, answer
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError, asyncio.LimitOverrunError) as error:
            raise EndpointError(f"{self._name}{path}: the answer broke off: {error or type(error).__name__}") from None
        except ValueError as error:  # a length that is no number, an event that is none
            raise EndpointError(f"{self._name}{path}: cannot be understood: {error}") from None
        finally:
            writer.close()

    def _request(self, method: str, path: str, body: object) -> bytes:
        data = b"" if body is None else msgspec.json.encode(body)
        head = [f"{method} {self._base}{path} HTTP/1.1", f"Host: {self._name}", "Connection: close"]
        head += ["Content-Type: application/json", f"Content-Length: {len(data)}"] if body is not None else []
        head += [f"Authorization: Bearer {self._key}"] if self._key else []
        return "\r\n".join([*head, "", ""]).encode("latin-1") + data

    async def _head(self, reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
        first = (await self._line(reader)).split(" ", 2)
        if len(first) < 2 or not first[0].startswith("HTTP/1.") or not first[1].isdecimal():
            raise EndpointError(f"{self._name}: does not speak HTTP/1.1")
        head = {}
        while line := await self._line(reader):
            name, _, value = line.partition(":")
            head[name.strip().lower()] = value.strip()
        return int(first[1]), head

    async def _line(self, reader: asyncio.StreamReader) -> str:
        async with asyncio.timeout(self._silence):
            return (await reader.readuntil(b"\r\n"))[:-2].decode("latin-1")

    async def _pieces(self, reader: asyncio.StreamReader, head: dict[str, str]) -> AsyncIterator[bytes]:
        """The body as it comes, whatever its framing."""
        if head.get("transfer-encoding", "").lower() == "chunked":
            while size := int((await self._line(reader)).partition(";")[0], 16):
                async with asyncio.timeout(self._silence):
                    yield (await reader.readexactly(size + 2))[:-2]
            return
        left = int(head["content-length"]) if "content-length" in head else _MOST_BODY
        while left > 0:
            async with asyncio.timeout(self._silence):
                data = await reader.read(min(left, 1 << 16))
            if not data:
                if "content-length" in head:
                    raise asyncio.IncompleteReadError(b"", left)
                return
            left -= len(data)
            yield data


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line
        if len(rest) > _MOST_LINE:
            raise EndpointError(f"an event of more than {_MOST_LINE} bytes")


async def _json(pieces: AsyncIterator[bytes]) -> Any:
    data = bytearray()
    async for piece in pieces:
        data += piece
        if len(data) > _MOST_BODY:
            raise EndpointError(f"an answer of more than {_MOST_BODY} bytes")
    try:
        return msgspec.json.decode(bytes(data))
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise EndpointError(f"answered with what is no JSON: {bytes(data[:100])!r}") from None


def _message(body: Any, status: int = 0) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return f"{text or 'failed'}{f' (HTTP {status})' if status else ''}"
