"""What an answer must match, as a grammar: forced or strict calls of tools, JSON of a schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgspec

from kdtp.server.bodies import ChatBody, ResponseFormat
from kdtp.server.errors import ApiError
from kdtp.server.tools import must_call
from kdtp.text import forced
from kdtp.text.calls import Format
from kdtp.text.files import TextError
from kdtp.text.tokenizer import Tokenizer
from kdtp.types import Grammar

MOST_GRAMMAR = 1 << 18  # characters


def constraint(body: ChatBody, tokenizer: Tokenizer, form: Format | None, thinking: bool) -> Grammar | None:
    """Of the answer to `body`, behind its thinking if it begins with that; None if it may be anything.

    form: how the model writes calls, if that is known. ApiError for what cannot be held.
    """
    called, schema = must_call(body.tools, body.tool_choice, body.parallel_tool_calls), _schema(body.response_format)
    if schema is not None and body.tools and body.tool_choice != "none":
        raise ApiError(400, "response_format: cannot be kept beside tools", "response_format")
    if called is not None:
        if form is None:
            text = f"{called.field}: the model has no form of tool calls that is known"
            raise ApiError(400, text, called.field)
        before = sum(len(message.tool_calls or ()) for message in body.messages)
        calls = tokenizer, form, called.functions, before, called.most, thinking, called.free
        return _limited("lark", lambda: forced.calls(*calls), "tools")
    if schema is None:
        return None
    if thinking:
        return _limited("lark", lambda: forced.after_thinking(tokenizer, schema), "response_format")
    return _limited("json_schema", lambda: msgspec.json.encode(schema).decode(), "response_format")


def _schema(form: ResponseFormat | None) -> Mapping[str, Any] | None:
    """What response_format asks for, if it is JSON."""
    if form is None:
        return None
    if form.json_schema is not None and form.type != "json_schema":
        field = "response_format.json_schema"
        raise ApiError(400, f"{field}: needs type = 'json_schema', which is {form.type!r}", field)
    if form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "object"}
    schema = form.json_schema.schema if form.json_schema else None
    if schema is None:
        raise ApiError(400, "response_format.json_schema.schema: is missing", "response_format.json_schema")
    return schema


def _limited(kind: Literal["json_schema", "lark"], make: Callable[[], str], field: str) -> Grammar:
    try:
        text = make()
    except TextError as error:
        raise ApiError(400, f"{field}: {error}", field) from None
    if len(text) > MOST_GRAMMAR:
        raise ApiError(400, f"{field}: a grammar of {len(text)} characters: must be at most {MOST_GRAMMAR}", field)
    return Grammar(kind, text)
