"""Request bodies: what is accepted, strictly typed and bounded; what is known and refused; what is not known."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Annotated, Any, Literal, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from kdtp.server.errors import ApiError
from kdtp.types import MOST_LOGPROBS, Token

MOST_CHOICES = 128  # of one request, over all its prompts
_MOST_NAMES = 20  # of unknown fields that are shown
_MOST_VALUE = 40  # characters of a wrong value that are shown

Tokens = Annotated[list[Token], Meta(max_length=1 << 20)]
IdList = Annotated[list[Token], Meta(max_length=1024)]
Int32 = Annotated[int, Meta(ge=-(2**31), lt=2**31)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Length = Annotated[int, Meta(ge=0, le=1 << 24)]
Best = Annotated[int, Meta(ge=0, le=MOST_LOGPROBS)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Name = Annotated[str, Meta(max_length=1024)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """include_usage: one more chunk, with the usage and no choices."""

    include_usage: bool | None = None


class Sampling(Struct, kw_only=True):
    """What both kinds of request have. Null is the same as absent."""

    model: Name | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    max_tokens: Length | None = None
    min_tokens: Length | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Meta(ge=0, lt=1)] | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: IdList | None = None
    ignore_eos: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=100)] | None = None
    logit_bias: dict[Annotated[str, Meta(max_length=20)], float] | None = None
    allowed_token_ids: IdList | None = None
    priority: Int32 | None = None
    cache_salt: Name | None = None
    speculate: bool | None = None
    draft_budget: Annotated[int, Meta(ge=0, le=1024)] | None = None


class CompletionBody(Sampling, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | Token | Tokens]
    echo: bool | None = None
    logprobs: Best | None = None


class Part(Struct, forbid_unknown_fields=True):
    """A piece of a message's content."""

    type: str
    text: str | None = None
    image_url: Any = None
    input_audio: Any = None
    file: Any = None
    refusal: str | None = None


class Function(Struct, forbid_unknown_fields=True):
    """A call that was made."""

    name: str
    arguments: str


class Call(Struct, forbid_unknown_fields=True):
    """A tool call of an assistant's message."""

    id: str
    function: Function
    type: Literal["function"] = "function"
    index: int | None = None


class Message(Struct):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: Name | None = None
    reasoning_content: str | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None


class ToolFunction(Struct):
    """What a tool is."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool that may be called."""

    type: str
    function: ToolFunction | None = None


class NamedFunction(Struct, forbid_unknown_fields=True):
    """Of tool_choice."""

    name: str


class NamedTool(Struct, forbid_unknown_fields=True):
    """The one tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Struct):
    """Of response_format."""

    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, forbid_unknown_fields=True):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=1 << 16)]
Tools = Annotated[list[Tool], Meta(max_length=1024)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
Effort = Annotated[str, Meta(max_length=32)]


class ChatInput(Protocol):
    """What a conversation's prompt is made of."""

    messages: Any
    tools: Any
    tool_choice: Any
    chat_template_kwargs: Any
    reasoning_effort: Any


class ChatBody(Sampling, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Best | None = None
    response_format: ResponseFormat | None = None


class TokenizeBody(Struct, kw_only=True):
    """POST /tokenize: a text, or messages as of a chat."""

    model: Name | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None


class DetokenizeBody(Struct, kw_only=True):
    """POST /detokenize."""

    model: Name | None = None
    tokens: Tokens


# Fields of OpenAI's or others' APIs that change what is answered and that we do not have: only these values, and null.
_ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (1,), "suffix": ("",), "use_beam_search": (False,), "length_penalty": (1, 1.0), "prompt_logprobs": (),
    "functions": ([],), "function_call": ("none",), "parallel_tool_calls": (True,), "modalities": (["text"],),
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
    """The body, and the names of its unknown fields. ApiError 400 naming the field."""
    try:
        raw = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        body = msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        found = re.fullmatch(r"(.*?)(?: - at `(?:key` in `)?\$\.?(.*)`)?", str(error), re.DOTALL)
        assert found is not None
        text, at = found.groups()
        raise ApiError(400, f"{at}{_value(data, at)}: {text}" if at else f"body: {text}", at or None) from None
    fields = {field.encode_name for field in msgspec.structs.fields(kind)}
    unknown = _unknown({name: value for name, value in raw.items() if name not in fields})
    if getattr(body, "messages", None):
        unknown += _unknown_in_messages(raw["messages"])
    if getattr(body, "tools", None):
        unknown += _unknown_in_tools(raw["tools"])
    return body, unknown[:_MOST_NAMES]


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
