"""From a request body to what the engine gets: token ids and sampling parameters."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kdtp.engine.plan import Plan
from kdtp.server.bodies import (
    MOST_CHOICES,
    ChatBody,
    ChatInput,
    CompletionBody,
    Sampling,
)
from kdtp.server.constraint import constraint
from kdtp.server.conversation import plain
from kdtp.server.errors import ApiError, invalid
from kdtp.server.journal import Extra
from kdtp.server.tools import shown
from kdtp.text.calls import AnswerParser, Format, find_format, is_thinking
from kdtp.text.files import TextError
from kdtp.text.stream import check_stops
from kdtp.text.template import ChatTemplate
from kdtp.text.tokenizer import Tokenizer
from kdtp.types import SamplingParams

TEMPERATURE = 1.0  # OpenAI's default
COMPLETION_TOKENS = 16  # likewise
EFFORT = "reasoning_effort"
SWITCHES = ("thinking", "enable_thinking")  # variables of templates that turn thinking off
# Fields that have the same name and meaning in SamplingParams.
_ALIKE = (
    *("min_tokens", "temperature", "top_p", "top_k", "min_p", "ignore_eos", "presence_penalty", "frequency_penalty"),
    "repetition_penalty",
)


@dataclass(frozen=True)
class Ask:
    """One choice to be made: a prompt and its parameters; ends: ids that end its text."""

    prompt: tuple[int, ...]
    params: SamplingParams
    ends: frozenset[int]
    extra: Extra


@dataclass(frozen=True)
class Model:
    """What is served, under which name. template: None if the model has none, then there is no chat; defaults: of its
    sampling, where a request does not say."""

    name: str
    plan: Plan
    tokenizer: Tokenizer
    template: ChatTemplate | None
    defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def context(self) -> int:
        """Tokens of the longest text."""
        return self.plan.model.max_position_embeddings

    def check_name(self, name: str | None) -> None:
        """404 for another model's name."""
        if name is not None and name != self.name:
            text = f"model = {name[:200]!r}: is not served here; must be {self.name!r}"
            raise ApiError(404, text, "model", "model_not_found")

    # ------------------------------------------------------------------ prompts

    def chat_ids(self, body: ChatInput) -> tuple[int, ...]:
        """The prompt of a conversation."""
        if self.template is None:
            raise ApiError(400, f"messages: {self.name} has no chat template; use /v1/completions", "messages")
        tools = shown(body.tools, body.tool_choice)
        messages = plain(body.messages)
        variables = self._variables(body)
        unknown = sorted(set(variables) - self.template.variables)
        if unknown:
            known = ", ".join(sorted(self.template.variables)) or "none"
            text = f"chat_template_kwargs.{unknown[0][:64]}: the template reads no such variable; it reads {known}"
            raise ApiError(400, text, "chat_template_kwargs")
        try:
            parts = self.template.render(messages, tools, variables=variables)
            return tuple(self.tokenizer.encode_parts(parts))
        except TextError as error:
            text = str(error).replace(f"{self.tokenizer.folder}/", "")  # where it lies is nobody's business
            raise ApiError(400, f"messages: {text}", "messages") from None

    def unread(self, body: ChatInput, prompt: Sequence[int]) -> list[str]:
        """Fields of messages that the template does not read, so that `prompt` is the same without them."""
        if all(message.name is None for message in body.messages):
            return []
        nameless = [msgspec.structs.replace(message, name=None) for message in body.messages]
        same = self.chat_ids(msgspec.structs.replace(body, messages=nameless)) == tuple(prompt)  # type: ignore[type-var]
        return ["messages[].name"] if same else []

    def _variables(self, body: ChatInput) -> dict[str, Any]:
        """Of the template: those given, and what reasoning_effort means to it."""
        given: dict[str, Any] = dict(body.chat_template_kwargs or {})
        effort = body.reasoning_effort
        if effort is None:
            return given
        assert self.template is not None
        if EFFORT in self.template.variables:
            return {EFFORT: effort} | given
        switch = next((name for name in SWITCHES if name in self.template.variables), None)
        if effort != "none" or switch is None:
            legal = "'none'" if switch else "absent: it has no thinking to set"
            text = f"{EFFORT} = {effort!r}: the model's template reads no such thing; must be {legal}"
            raise ApiError(400, text, EFFORT, "unsupported_parameter")
        return {switch: False} | given

    def text_ids(self, text: str, begin: bool = True) -> tuple[int, ...]:
        """The prompt of a text to be continued."""
        return (*(self.tokenizer.begin if begin else ()), *self.tokenizer.encode(text))

    def prompts(self, given: str | Sequence[Any]) -> list[tuple[int, ...]]:
        """The prompts of /v1/completions: a text, texts, token ids, or lists of token ids."""
        if isinstance(given, str):
            return [self._prompt("prompt", given)]
        kinds = {type(item) for item in given}
        if not given or len(kinds) > 1:
            raise ApiError(400, "prompt: must be a text, texts, token ids, or lists of token ids; not empty", "prompt")
        if kinds == {int}:
            return [tuple(given)]
        if len(given) > MOST_CHOICES:
            raise ApiError(400, f"prompt: {len(given)} prompts: must be at most {MOST_CHOICES}", "prompt")
        return [self._prompt(f"prompt[{i}]", item) for i, item in enumerate(given)]

    def _prompt(self, where: str, given: str | Sequence[int]) -> tuple[int, ...]:
        if not given:
            raise ApiError(400, f"{where}: is empty", "prompt")
        return self.text_ids(given) if isinstance(given, str) else tuple(given)

    def parser(self, prompt: Sequence[int], body: ChatBody) -> AnswerParser:
        """For the answer to a prompt of `chat_ids`."""
        form = None if body.tool_choice == "none" else self._form()
        return AnswerParser(self.tokenizer, form, is_thinking(self.tokenizer, prompt))

    def _form(self) -> Format | None:
        """How it writes tool calls."""
        assert self.template is not None
        return find_format(self.tokenizer, self.template.source)

    # ------------------------------------------------------------------ parameters

    def asks_chat(self, body: ChatBody) -> list[Ask]:
        """The choices that a chat request asks for."""
        prompt = self.chat_ids(body)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs: needs logprobs = true", "top_logprobs")
        most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        if body.max_tokens not in (None, most):
            text = f"max_tokens = {body.max_tokens}: differs from max_completion_tokens = {most}; give one of them"
            raise ApiError(400, text, "max_tokens")
        if body.max_completion_tokens == 0:
            raise ApiError(400, "max_completion_tokens = 0: must be at least 1", "max_completion_tokens")
        if most is None:
            most = max(1, self._room() - len(prompt))
        thinking = is_thinking(self.tokenizer, prompt)
        grammar = constraint(body, self.tokenizer, self._form(), thinking)
        best = (body.top_logprobs or 0) if body.logprobs else None
        return self._asks([prompt], body, most, logprobs=best, grammar=grammar)

    def asks_completion(self, body: CompletionBody) -> list[Ask]:
        """The choices that a completion request asks for: n for each prompt, in that order."""
        most = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        scored = body.logprobs if body.echo else None
        if most == 0 and scored is None:
            if not body.echo:
                raise ApiError(400, "max_tokens = 0: must be at least 1 without echo", "max_tokens")
            scored = 0
        return self._asks(self.prompts(body.prompt), body, most, logprobs=body.logprobs, prompt_logprobs=scored)

    def _room(self) -> int:
        config = self.plan.config
        return min(self.context, config.kv_tokens - config.drafter.budget - 1)

    def _asks(self, prompts: Sequence[tuple[int, ...]], body: Sampling, most: int, **more: Any) -> list[Ask]:
        count = body.n or 1
        if len(prompts) * count > MOST_CHOICES:
            text = f"n = {count}: of {len(prompts)} prompts; must be at most {MOST_CHOICES} choices in all"
            raise ApiError(400, text, "n")
        self._check_queue(prompts, count)
        for prompt in prompts:
            if len(prompt) > self.context:
                text = f"prompt: {len(prompt)} tokens, but the model's context is {self.context}"
                raise ApiError(400, text, "prompt", "context_length_exceeded")
        size = self.plan.model.vocab_size
        for i, token in enumerate(body.stop_token_ids or ()):
            if token >= size:
                raise ApiError(400, f"stop_token_ids[{i}] = {token}: must be below {size}", f"stop_token_ids[{i}]")
        stops = frozenset(body.stop_token_ids or ())
        if not body.ignore_eos:
            stops |= self.tokenizer.stop_ids
        ends = stops if body.ignore_eos else stops | set(self.plan.model.eos_token_ids)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        params = [self._params(body, most, seed + i, stops, more) for i in range(count)]
        extra = Extra(body.speculate is not False, body.draft_budget, body.priority or 0, body.cache_salt or "")
        return [Ask(prompt, each, ends, extra) for prompt in prompts for each in params]

    def _check_queue(self, prompts: Sequence[tuple[int, ...]], count: int) -> None:
        """ApiError for more than even an idle engine takes at once."""
        config, choices = self.plan.config, len(prompts) * count
        tokens = count * sum(len(prompt) for prompt in prompts)
        if choices > config.max_queue:
            most = f"{config.max_queue} may wait (--max-queue)"
        elif choices > 1 and tokens > config.max_queue_tokens:
            most = f"{config.max_queue_tokens} tokens may wait (--max-queue-tokens), not {tokens}"
        else:
            return
        raise ApiError(400, f"n = {count}: of {len(prompts)} prompt(s), but at most {most}", "n")

    def _params(self, body: Sampling, most: int, seed: int, stops: frozenset[int], more: Mapping[str, Any]) -> Any:
        given: dict[str, Any] = {"temperature": TEMPERATURE, **self.defaults}
        given |= {name: value for name in _ALIKE if (value := getattr(body, name)) is not None}
        try:
            return SamplingParams(
                max_tokens=most,
                seed=(seed + (1 << 63)) % (1 << 64) - (1 << 63),
                stop_tokens=tuple(sorted(stops)),
                logit_bias=_biases(body.logit_bias or {}, self.plan.model.vocab_size),
                allowed_tokens=tuple(body.allowed_token_ids or ()),
                **given,
                **more,
            )
        except ValueError as error:
            raise invalid(error) from None


def stop_strings(body: Sampling) -> list[str]:
    """The stop strings of a request."""
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    try:
        check_stops(stops)
    except TextError as error:
        raise invalid(error) from None
    return stops


def _biases(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    biases = {}
    for name, bias in given.items():
        # "01" is no id: beside "1" it would be lost.
        if not (name.isascii() and name.isdecimal() and name == str(int(name)) and int(name) < vocab_size):
            raise ApiError(400, f"logit_bias[{name!r}]: must be a token id below {vocab_size}", "logit_bias")
        biases[int(name)] = bias
    return biases
