"""What every HTTP request passes: key, limits, an id of our own, a line in the log. Pure ASGI, so that a client's
leaving is seen behind it."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Collection, Sequence

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kdtp.log import logger
from kdtp.server.assets import PAGE
from kdtp.server.errors import ApiError

OPEN_TO_ALL = {"/health", *PAGE}
QUIET = {*OPEN_TO_ALL, "/metrics", "/v1/status", "/v1/requests"}  # asked for all the time
MOST_BODY = 8 << 20  # bytes
MOST_HEADERS = 100
MOST_HEAD = 1 << 16  # bytes of request line and headers
BODY_TIMEOUT = 60.0  # seconds
_LABEL = 64  # characters of a client's own request id that are logged


def respond(error: ApiError) -> Response:
    """An error as a response."""
    return Response(msgspec.json.encode(error.body()), error.status, error.headers, "application/json")


class Gate:
    """ASGI middleware. keys: those that open the door; none: it is open. hosts: names in the Host header; None: any.
    active: requests that are being answered."""

    def __init__(self, app: ASGIApp, keys: Sequence[str] = (), hosts: Collection[str] | None = None) -> None:
        self._app = app
        self._hosts = hosts
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self.active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request pass, or answer it."""
        if scope["type"] != "http":
            raise RuntimeError(f"{scope['type']}: only http is served")
        began, request_id, status = time.monotonic(), f"req-{secrets.token_hex(12)}", 0
        scope.setdefault("state", {})["id"] = request_id

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                warning = scope["state"].get("ignored", "")
                ignored = [(b"x-kdtp-ignored-fields", warning.encode("ascii", "replace"))] if warning else []
                head = [*message["headers"], (b"x-request-id", request_id.encode()), *ignored]
                message = {**message, "headers": head}
            await send(message)

        self.active += 1
        headers = Headers(scope=scope)
        try:
            refusal = self._refusal(scope["path"], headers)
            app = self._app if refusal is None else respond(refusal)
            await app(scope, receive, send_with_id)
        finally:
            self.active -= 1
            label, seconds = headers.get("x-request-id", "")[:_LABEL], time.monotonic() - began
            line = f"{request_id} {scope['method']} {scope['path'][:200]} {status or 'no answer'} {seconds:.3f} s"
            level = logging.DEBUG if scope["path"] in QUIET else logging.INFO
            logger.log(level, "%s%s", line, f" client's id {label}" if label else "")

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        if len(headers) > MOST_HEADERS:
            return ApiError(431, f"{len(headers)} headers: must be at most {MOST_HEADERS}")
        size = len(path) + sum(len(name) + len(value) for name, value in headers.raw)
        if size > MOST_HEAD:  # h11 looks at a head only while it is incomplete
            return ApiError(431, f"headers of {size} bytes: must be at most {MOST_HEAD}")
        if "content-length" in headers and "transfer-encoding" in headers:  # which one counts, proxies do not agree on
            text = "Content-Length and Transfer-Encoding: must not both be there"
            return ApiError(400, text, code="bad_http", headers={"Connection": "close"})
        if int(headers.get("content-length", 0)) > MOST_BODY:
            return _too_long()
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if self._hosts is not None and "host" in headers and host not in self._hosts:
            # A web page elsewhere may have its own name point to this machine, and so be let in by the browser.
            legal = ", ".join(sorted(self._hosts))
            return ApiError(403, f"Host: {host[:100]!r}: must be one of {legal} (--allowed-host)", code="invalid_host")
        if not self._digests or path in OPEN_TO_ALL:
            return None
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        found = [hmac.compare_digest(given, digest) for digest in self._digests]  # all of them, whichever fits
        if scheme.lower() == "bearer" and any(found):
            return None
        text = "a key is needed: Authorization: Bearer KEY" if not key else "the key is not one of ours"
        return ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def _too_long() -> ApiError:
    return ApiError(413, f"the body has more than {MOST_BODY} bytes", headers={"Connection": "close"})


async def read_body(request: Request) -> bytes:
    """The body, counted while it comes. ApiError for one that is too long, too slow, or not said to be JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # any web page may post text to a server on this machine
        raise ApiError(415, f"content-type = {kind[:100]!r}: must be application/json")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise ApiError(415, f"content-encoding = {coding[:100]!r}: must be identity or absent")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT):
            async for part in request.stream():
                data += part
                if len(data) > MOST_BODY:
                    raise _too_long()
    except TimeoutError:
        text = f"the body did not come within {BODY_TIMEOUT:.0f} s"
        raise ApiError(408, text, headers={"Connection": "close"}) from None
    return bytes(data)
