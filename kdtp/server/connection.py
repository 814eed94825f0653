"""A client's connection: uvicorn's, with a bound on how many there are, and on how long one may say nothing or may not
read."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, cast

import h11
import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from kdtp.log import logger
from kdtp.server.errors import ApiError, busy

HEAD_TIMEOUT = 15.0  # seconds for the request line and headers, from the first moment that they are waited for
READ_TIMEOUT = 60.0  # seconds that a client may leave an answer unread
MOST_CONNECTIONS = 2048
REST_TIMEOUT = 5.0  # seconds for the rest of a body that was answered before its end


class _Transport:
    """A transport that is closed in two steps while `is_sent_more`: were the socket closed at once, the client would
    be told that it cannot send on, and lose the answer that says why (RFC 9112, 9.6)."""

    def __init__(self, transport: asyncio.Transport, is_sent_more: Callable[[], bool]) -> None:
        self._transport, self._is_sent_more = transport, is_sent_more
        self._end: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more is to be written, and what comes is to be dropped."""
        return self._end is not None or self._transport.is_closing()

    def close(self) -> None:
        """Say no more; the client closes, or time is up."""
        if self.is_closing() or not self._is_sent_more():
            self._transport.close()
            return
        self._end = asyncio.get_running_loop().call_later(REST_TIMEOUT, self._transport.abort)
        self._transport.write_eof()
        self._transport.resume_reading()

    def closed(self) -> None:
        """The socket is closed."""
        if self._end is not None:
            self._end.cancel()


class Connection(H11Protocol):
    """One connection. Between two requests it may be idle as long as uvicorn's keep-alive says."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take it, unless there are too many."""
        self._socket = _Transport(transport, lambda: self.conn.their_state in (h11.SEND_BODY, h11.ERROR))
        super().connection_made(cast(asyncio.Transport, self._socket))
        if len(self.connections) > MOST_CONNECTIONS:
            logger.warning("%d connections: one more is refused", MOST_CONNECTIONS)
            self._refuse(busy(f"there are {MOST_CONNECTIONS} connections already", 1.0))
        else:
            self._deadline = self.loop.call_later(HEAD_TIMEOUT, self._late)

    def data_received(self, data: bytes) -> None:
        """Read on; a head that has begun must come to its end."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._deadline is None and not self.transport.is_closing():
            self._deadline = self.loop.call_later(HEAD_TIMEOUT, self._late)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        self._stop_waiting()
        self._is_read()
        super().connection_lost(exc)
        self._socket.closed()

    def pause_writing(self) -> None:
        """Too much waits for the client. Closing would wait for it too, and for ever."""
        super().pause_writing()
        self._unread = self.loop.call_later(READ_TIMEOUT, self.transport.abort)

    def resume_writing(self) -> None:
        """It has read."""
        super().resume_writing()
        self._is_read()

    def send_400_response(self, msg: str) -> None:
        """As all errors look."""
        self._refuse(ApiError(400, "this is no HTTP/1.1 request, or its headers are too long", code="bad_http"))

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: who asks is answered as if he had not, and uvicorn's advice to install packages is not ours."""

    def _late(self) -> None:
        self._deadline = None
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._refuse(ApiError(408, f"the headers did not come within {HEAD_TIMEOUT:.0f} s", code="timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Say why, unless an answer is under way, and close."""
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = msgspec.json.encode(error.body())
            status = f"{error.status} {HTTPStatus(error.status).phrase}"
            fields = {"Content-Type": "application/json", "Content-Length": len(body), "Connection": "close"}
            head = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in {**fields, **error.headers}.items())]
            self.transport.write("\r\n".join([*head, "", ""]).encode() + body)
        self.transport.close()

    def _is_read(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
