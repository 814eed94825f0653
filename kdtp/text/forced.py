"""Answers that must have a form, as grammars in llguidance's dialect of Lark: tool calls, JSON, both after thinking.

Control tokens stand in them by their ids, so no text can take their place.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kdtp.text.calls import THINK, Format
from kdtp.text.files import TextError
from kdtp.text.schemas import endless
from kdtp.text.tokenizer import Tokenizer

MOST_CALLS = 16  # of one answer: a model that is lost would go on for ever
_TEXT = r"/[\s\S]+/"
_SPACES = {"whitespace_pattern": r"[ \n\r\t]{0,40}"}


def calls(
    tokenizer: Tokenizer,
    form: Format,
    tools: Sequence[Mapping[str, Any]],
    first: int,
    most: int,
    thinking: bool,
    free: bool = False,
) -> str:
    """The grammar of 1 .. most calls of `tools` (OpenAI's function objects), nothing else but thinking before.

    first: calls that the conversation has had, which Kimi's ids go on from; free: any text may come before the calls,
    or without any. TextError for a schema that no arguments match.
    """
    begin, end, separator = (_id(tokenizer, name) for name in (form.call_begin, form.call_end, form.separator))
    more = f"({_text(chr(10)) if form.fenced else ''} call){{0,{most - 1}}} " if most > 1 else ""
    section = f"{_id(tokenizer, form.section_begin)} call {more}{_id(tokenizer, form.section_end)}"
    kinds = " | ".join(f"tool_{i}" for i in range(len(tools)))
    start = f"{_anything(tokenizer)} ({section})?" if free else _before(tokenizer, thinking) + section
    lines = [f"start: {start}", f"call: {begin} ({kinds}) {end}"]
    if form.has_ids:
        lines.append(f"INDEX: /{'|'.join(str(first + i) for i in range(most))}/")
    for i, tool in enumerate(tools):
        name = tool["name"]
        if form.has_ids:
            lines.append(f"tool_{i}: {_text(f'functions.{name}:')} INDEX {separator} arguments_{i}")
        elif form.fenced:
            lines.append(
                f'tool_{i}: "function" {separator} {_text(name + chr(10) + "```json" + chr(10))} '
                f"arguments_{i} {_text(chr(10) + '```')}"
            )
        else:
            lines.append(f"tool_{i}: {_text(name)} {separator} arguments_{i}")
        lines.append(f"arguments_{i}: {_json({'type': 'object', **tool.get('parameters', {})}, name)}")
    return "\n".join(lines)


def after_thinking(tokenizer: Tokenizer, schema: Mapping[str, Any]) -> str:
    """The grammar of JSON that matches a schema, behind the rest of a thought. TextError as of `calls`."""
    return f"start: {_before(tokenizer, True)}answer\nanswer: {_json(schema, 'json_schema')}"


def _before(tokenizer: Tokenizer, thinking: bool) -> str:
    if not thinking:
        return ""
    return f"/[\\s\\S]*/ {_id(tokenizer, THINK[1])} /[ \\n]{{0,4}}/ "


def _anything(tokenizer: Tokenizer) -> str:
    """Text, thoughts and their marks, but none of calls."""
    marks = [_id(tokenizer, name) for name in THINK if name in tokenizer.controls]
    return f"({' | '.join([_TEXT, *marks])})*"


def _id(tokenizer: Tokenizer, name: str) -> str:
    return f"<[{tokenizer.controls[name]}]>"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any], what: str) -> str:
    if loop := endless(schema):
        raise TextError(f"{what}: no value of its schema ever ends: {loop}")
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACES}, ensure_ascii=False)}"
