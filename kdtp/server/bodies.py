"""Request bodies: what is accepted, strictly typed and bounded."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from msgspec import Meta, Struct

from kdtp.types import MOST_LOGPROBS, Token

MOST_CHOICES = 128  # of one request, over all its prompts

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
    allowed_token_ids: Annotated[list[Token], Meta(min_length=1, max_length=1024)] | None = None
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


# OpenAI's rule. What a template's author marks with (control characters, "<|…|>") cannot be in one.
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}(?!\n)$")]


class ToolFunction(Struct):
    """What a tool is."""

    name: ToolName
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
    parallel_tool_calls: bool | None = None
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
