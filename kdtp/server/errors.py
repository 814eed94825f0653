"""Errors as OpenAI's API has them: {"error": {message, type, param, code}}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import ceil
from typing import Any

from kdtp.messages import Failed, Refused

# What the engine calls otherwise than the API does.
_NAMES = {"stop_tokens": "stop_token_ids", "allowed_tokens": "allowed_token_ids"}
_NEXT_SERVER = 10.0  # seconds until there may be another server in the place of one that ends
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 503: "overloaded_error"}


class ApiError(Exception):
    """An answer that is an error. param: the field it is about, as a path; code: for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """What is sent."""
        kind = _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def gone(message: str, code: str) -> ApiError:
    """503 of a server that is about to end."""
    return busy(message, _NEXT_SERVER, code)


def busy(message: str, seconds: float, code: str = "overloaded") -> ApiError:
    """503 that says when to try again."""
    return ApiError(503, message, code=code, headers={"Retry-After": str(max(1, ceil(seconds)))})


def invalid(error: ValueError, param: str | None = None) -> ApiError:
    """400 of an error text that begins with the name of what is wrong, unless `param` names it."""
    text = str(error)
    found = re.match(r"([a-z_]+)(?:\[\d+\])? *[=:]", text)
    name = found.group(1) if found else None
    text = re.sub(rf"\b({'|'.join(_NAMES)})\b", lambda known: _NAMES[known.group()], text)
    return ApiError(400, text, param or _NAMES.get(name or "", name))


def of_terminal(event: Failed | Refused, grammar: str) -> ApiError:
    """What a request is told that the engine did not serve; grammar: the field that asked for one."""
    if isinstance(event, Refused):
        return busy(event.reason, event.retry_after)
    if event.code == "invalid":
        return invalid(ValueError(re.sub(r"^grammar\b", grammar, event.message)))
    if event.code == "shutdown":
        return gone(event.message, "engine_shutdown")
    return ApiError(500, event.message, code=f"engine_{event.code}")
