"""From the bytes of a request to its body: what is not known, what is known and refused, what stands there twice."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from kdtp.server.bodies import JsonSchema, Message, Tool, ToolFunction
from kdtp.server.errors import ApiError

_MOST_NAMES = 20  # of fields without effect that are shown
_MOST_VALUE = 40  # characters of a wrong value that are shown
_TOKENS = re.compile(rb'"([^"\\]*(?:\\.[^"\\]*)*)"(\s*:)?|([{}])', re.DOTALL)
_ESCAPES = re.compile(rb"\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|(\\u[dD][89a-fA-F]\w\w)|\\.", re.DOTALL)

# Fields of OpenAI's or others' APIs that change what is answered and that we do not have: only these values, and null.
_ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "suffix": ("",), "use_beam_search": (False,), "length_penalty": (1, 1.0), "prompt_logprobs": (),
    "functions": ([],), "function_call": ("none",), "modalities": (["text"],),
    "audio": (), "prediction": (), "web_search_options": (), "store": (False,), "service_tier": ("auto", "default"),
    "verbosity": (), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "chat_template": (), "documents": ([],), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "structured_outputs": (), "bad_words": ([],), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "spaces_between_special_tokens": (True,), "truncate_prompt_tokens": (),
    "return_token_ids": (False,), "return_tokens_as_token_ids": (False,),
    "logits_processors": (), "mirostat": (0,), "typical_p": (1, 1.0), "grammar": ("",), "echo": (False,),
}  # fmt: skip
# Fields that say who asks, or how to find the request again: no answer depends on them.
_LABELS = {
    "user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "request_id",
}  # fmt: skip

B = TypeVar("B", bound=Struct)


def decode(data: bytes, kind: type[B]) -> tuple[B, list[str]]:
    """The body, and the names of its fields that have no effect. ApiError 400 naming the field."""
    try:
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        body = msgspec.json.decode(data, type=kind)
        data.decode()  # what is not known has not been looked at
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        found = re.fullmatch(r"(.*?)(?: - at `(?:key` in `)?\$\.?(.*)`)?", str(error), re.DOTALL)
        assert found is not None
        text, at = found.groups()
        if not at:
            text = "is nested too deeply" if isinstance(error, RecursionError) else _half(data) or text
        raise ApiError(400, f"{at}{_value(data, at)}: {text}" if at else f"body: {text}", at or None) from None
    fields = {field.encode_name for field in msgspec.structs.fields(kind)}
    unknown = _unknown({name: value for name, value in raw.items() if name not in fields})
    if getattr(body, "messages", None):
        unknown += _unknown_in_messages(raw["messages"])
    if getattr(body, "tools", None):
        unknown += _unknown_in_tools(raw["tools"])
    if getattr(getattr(body, "response_format", None), "json_schema", None):
        others = set(_fields(_fields(raw["response_format"])["json_schema"])).difference(JsonSchema.__struct_fields__)
        unknown += [f"response_format.json_schema.{_shown(name)}" for name in sorted(others)]
    return body, (unknown + _twice(data))[:_MOST_NAMES]


def _half(data: bytes) -> str:
    """What is wrong with the first escape of half a surrogate pair, if there is one: the decoder tells of its end."""
    half = next((escape for escape in _ESCAPES.finditer(data) if escape[1]), None)
    return f"{half[1].decode()} is half of a surrogate pair, no character (byte {half.start()})" if half else ""


def _twice(data: bytes) -> list[str]:
    """Names that an object of well-formed JSON has more than once: the last one counts."""
    found: dict[str, None] = {}
    objects: list[set[str]] = []
    # A loop, for a parser in C would hold up the streams of others for as long as it runs.
    for token in _TOKENS.finditer(data):
        name, colon, brace = token.groups()
        if brace == b"{":
            objects.append(set())
        elif brace:
            objects.pop()
        elif colon:
            key = msgspec.json.decode(b'"%s"' % name, type=str) if b"\\" in name else name.decode()
            if key in objects[-1]:
                found[key] = None
            objects[-1].add(key)
    return [f"{_shown(key)} (given twice)" for key in found]


def _value(data: bytes, at: str) -> str:
    """What stands at a path of the body, as " = 129"; nothing for what is no single value."""
    raw = msgspec.Raw(data)
    with suppress(msgspec.DecodeError, RecursionError, KeyError):
        for name, index in re.findall(r"(\w+)|\[(\d+)\]", at):
            raw = _fields(raw)[name] if name else msgspec.json.decode(raw, type=list[msgspec.Raw])[int(index)]
        text = bytes(raw).decode()
        if "..." not in at and text[0] not in "{[":
            return f" = {text[:_MOST_VALUE]}{'…' * (len(text) > _MOST_VALUE)}"
    return ""


def _fields(raw: msgspec.Raw) -> dict[str, msgspec.Raw]:
    return msgspec.json.decode(raw, type=dict[str, msgspec.Raw])


def _unknown(others: dict[str, msgspec.Raw]) -> list[str]:
    unknown = []
    for name, raw in others.items():
        if name in _ONLY:
            value = msgspec.json.decode(raw)
            if value is not None and not any(type(v) is type(value) and v == value for v in _ONLY[name]):
                legal = " or ".join(msgspec.json.encode(v).decode() for v in _ONLY[name]) or "absent"
                raise ApiError(400, f"{name}: is not supported here; must be {legal}", name, "unsupported_parameter")
        elif name not in _LABELS:
            unknown.append(_shown(name))
    return unknown


def _unknown_in_messages(raw: msgspec.Raw) -> list[str]:
    """Fields of messages that are not read, unless they are empty: clients send back what they got."""
    messages = msgspec.json.decode(raw, type=list[dict[str, msgspec.Raw]])
    others = {name for message in messages for name, value in message.items() if bytes(value) not in (b"null", b"[]")}
    return [f"messages[].{_shown(name)}" for name in sorted(others.difference(Message.__struct_fields__))]


def _unknown_in_tools(raw: msgspec.Raw) -> list[str]:
    tools = msgspec.json.decode(raw, type=list[dict[str, msgspec.Raw]])
    functions = [_fields(tool["function"]) for tool in tools if bytes(tool.get("function", b"null")) != b"null"]
    return [
        f"{where}.{_shown(name)}"
        for where, found, kind in (("tools[]", tools, Tool), ("tools[].function", functions, ToolFunction))
        for name in sorted(set().union(*found).difference(kind.__struct_fields__))
    ]


def _shown(name: str) -> str:
    plain = name.isprintable() and name.isascii() and 0 < len(name.strip()) == len(name) < 64
    return name if plain else ascii(name)[:64].strip()
