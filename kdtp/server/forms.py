"""How answers look: chat completions and text completions, whole or in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kdtp.server.choice import Grown
from kdtp.text.calls import Arguments, CallBegin, Content, Delta, Reasoning
from kdtp.text.tokenizer import Tokenizer
from kdtp.types import Logprob

LEAST_LOGPROB = -9999.0  # OpenAI's value for "very unlikely"; JSON has no -inf

Json = dict[str, Any]


class Form(Protocol):
    """One API's answers. begin: the first chunk of a choice, if there is one; chunks: what a choice's growth adds;
    keep: the same for a whole answer; choices: the whole answer."""

    prefix: str
    whole: str
    chunk: str

    def begin(self, index: int) -> list[Json]: ...
    def scored(self, index: int, logprobs: Sequence[Logprob]) -> None: ...
    def chunks(self, index: int, grown: Grown) -> list[Json]: ...
    def keep(self, index: int, grown: Grown) -> None: ...
    def choices(self) -> list[Json]: ...


def _value(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


@dataclass
class _Said:
    """What a choice has said so far."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    reason: str | None = None

    def add(self, grown: Grown) -> None:
        for delta in grown.deltas:
            match delta:
                case Content():
                    self.text.append(delta.text)
                case Reasoning():
                    self.reasoning.append(delta.text)
                case CallBegin():
                    function = {"name": delta.name, "arguments": ""}
                    self.calls.append({"id": delta.id, "type": "function", "function": function})
                case Arguments():
                    self.calls[delta.index]["function"]["arguments"] += delta.text
        self.logprobs += grown.logprobs
        self.reason = grown.reason or self.reason


class ChatForm:
    """/v1/chat/completions."""

    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, count: int, logprobs: bool) -> None:
        self._tokenizer = tokenizer
        self._said = [_Said() for _ in range(count)]
        self._logprobs = logprobs

    def begin(self, index: int) -> list[Json]:
        """The role comes first."""
        return [{"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]

    def scored(self, index: int, logprobs: Sequence[Logprob]) -> None:
        """A chat's prompt is not scored."""

    def chunks(self, index: int, grown: Grown) -> list[Json]:
        """A chunk for each piece; log-probabilities come with the first one, or alone."""
        deltas: list[Json] = [found for delta in grown.deltas if (found := _delta(delta))]
        if not deltas and (self._logprobs and grown.logprobs):
            deltas = [{}]
        chunks: list[Json] = [{"index": index, "delta": delta, "finish_reason": None} for delta in deltas]
        if self._logprobs and chunks:
            chunks[0]["logprobs"] = self._content(grown.logprobs)
        if grown.reason:
            chunks.append({"index": index, "delta": {}, "finish_reason": grown.reason})
        return chunks

    def keep(self, index: int, grown: Grown) -> None:
        """Remember it for `choices`."""
        self._said[index].add(grown)

    def choices(self) -> list[Json]:
        """The whole answer."""
        return [self._choice(index, said) for index, said in enumerate(self._said)]

    def _choice(self, index: int, said: _Said) -> Json:
        text = "".join(said.text)
        message: Json = {"role": "assistant", "content": None if said.calls and not text else text}
        if said.reasoning:
            message["reasoning_content"] = "".join(said.reasoning)
        if said.calls:
            message["tool_calls"] = said.calls
        logprobs = self._content(said.logprobs) if self._logprobs else None
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": said.reason}

    def _content(self, logprobs: Sequence[Logprob]) -> Json:
        entries = []
        for known in logprobs:
            best = [self._entry(token, value) for token, value in known.best]
            entries.append(self._entry(known.token, known.logprob) | {"top_logprobs": best})
        return {"content": entries, "refusal": None}

    def _entry(self, token: int, logprob: float) -> Json:
        data = self._tokenizer.token_bytes(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": _value(logprob), "bytes": list(data)}


def _delta(delta: Delta) -> Json | None:
    match delta:
        case Content():
            return {"content": delta.text}
        case Reasoning():
            return {"reasoning_content": delta.text}
        case CallBegin():
            function = {"name": delta.name, "arguments": ""}
            return {"tool_calls": [{"index": delta.index, "id": delta.id, "type": "function", "function": function}]}
        case Arguments():
            return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    return None


class CompletionForm:
    """/v1/completions. echo: each choice's prompt, if it is to be repeated."""

    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(
        self, tokenizer: Tokenizer, count: int, logprobs: bool, echo: Sequence[tuple[int, ...]] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._said = [_Said() for _ in range(count)]
        self._logprobs = logprobs
        self._echo = echo
        self._scores: list[list[Logprob]] = [[] for _ in range(count)]
        self._offsets = [0] * count

    def begin(self, index: int) -> list[Json]:
        """Nothing: the prompt comes with the first text."""
        return []

    def scored(self, index: int, logprobs: Sequence[Logprob]) -> None:
        """Log-probabilities of the prompt, from its second token on."""
        self._scores[index] += logprobs

    def chunks(self, index: int, grown: Grown) -> list[Json]:
        """One chunk."""
        text = "".join(delta.text for delta in grown.deltas if isinstance(delta, Content))
        if self._echo is not None and not self._said[index].text:
            text, logprobs = self._echoed(index, text, grown.logprobs)
            self._said[index].text.append(text)
        else:
            logprobs = self._table(index, grown.logprobs)
        if not text and not grown.reason and not grown.logprobs:
            return []
        return [self._choice(index, text, logprobs, grown.reason)]

    def keep(self, index: int, grown: Grown) -> None:
        """Remember it for `choices`."""
        self._said[index].add(grown)

    def choices(self) -> list[Json]:
        """The whole answer."""
        found = []
        for index, said in enumerate(self._said):
            text = "".join(said.text)
            if self._echo is None:
                logprobs = self._table(index, said.logprobs)
            else:
                text, logprobs = self._echoed(index, text, said.logprobs)
            found.append(self._choice(index, text, logprobs, said.reason))
        return found

    def _choice(self, index: int, text: str, logprobs: Json, reason: str | None) -> Json:
        table = logprobs if self._logprobs else None
        return {"index": index, "text": text, "logprobs": table, "finish_reason": reason}

    def _echoed(self, index: int, text: str, logprobs: Sequence[Logprob]) -> tuple[str, Json]:
        assert self._echo is not None
        prompt = self._echo[index]
        first = self._table(index, [Logprob(prompt[0], 0.0, 1, ())]) if self._logprobs else {}
        if first:
            first["token_logprobs"], first["top_logprobs"] = [None], [None]  # nothing precedes the first
        rest = self._table(index, [*self._scores[index], *logprobs])
        table = {key: first[key] + rest[key] for key in rest} if first else rest
        return self._tokenizer.decode(prompt) + text, table

    def _table(self, index: int, logprobs: Sequence[Logprob]) -> Json:
        table: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for known in logprobs:
            token = self._text(known.token)
            table["tokens"].append(token)
            table["token_logprobs"].append(_value(known.logprob))
            table["top_logprobs"].append({self._text(t): _value(v) for t, v in known.best})
            table["text_offset"].append(self._offsets[index])
            self._offsets[index] += 0 if known.token in self._tokenizer.hidden else len(token)
        return table

    def _text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode("utf-8", "replace")
