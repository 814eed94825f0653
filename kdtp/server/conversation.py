"""Messages of a chat, as chat templates read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kdtp.server.bodies import Message
from kdtp.server.errors import ApiError


def plain(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Content in one text, no field that is null. ApiError naming the message and what is wrong with it."""
    return [_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _message(where: str, given: Message) -> dict[str, Any]:
    """As chat templates read it: content in one text."""
    message: dict[str, Any] = {"role": "system" if given.role == "developer" else given.role}
    message["content"] = given.content if not isinstance(given.content, list) else _text(where, given)
    for key in ("name", "reasoning_content", "tool_call_id"):
        if getattr(given, key) is not None:
            message[key] = getattr(given, key)
    if given.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": msgspec.to_builtins(call.function)}
            for call in given.tool_calls
        ]
    elif given.role in ("user", "system", "developer") and not given.content and given.content != "":
        raise ApiError(400, f"{where}.content: is missing", f"{where}.content")
    return message


def _text(where: str, given: Message) -> str:
    assert isinstance(given.content, list)
    for i, part in enumerate(given.content):
        at = f"{where}.content[{i}]"
        if part.type != "text":
            raise ApiError(400, f"{at}.type = {part.type[:64]!r}: must be 'text'", f"{at}.type")
        if part.text is None:
            raise ApiError(400, f"{at}.text: is missing", f"{at}.text")
        for name in ("image_url", "input_audio", "file", "refusal"):
            if getattr(part, name) is not None:
                raise ApiError(400, f"{at}.{name}: must be absent from a part of type 'text'", f"{at}.{name}")
    return "\n".join(part.text or "" for part in given.content)
