"""Text around the engine's token ids: the tokenizer beside a model, prompts made of text, the answer as it grows."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kdtp.config import EngineConfig
from kdtp.engine.api import Completion
from kdtp.messages import Tokens
from kdtp.text.calls import AnswerParser, Arguments, CallBegin, Content, Delta, Reasoning, find_format, is_thinking
from kdtp.text.stream import TextStream
from kdtp.text.template import ChatTemplate, Message
from kdtp.text.tokenizer import CODECS, Tokenizer, load


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Add what concerns text."""
    parser.add_argument("--system", metavar="TEXT", help="the conversation's system message")
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times"
    )
    parser.add_argument(
        "--template-set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of the chat template, such as thinking=false; the value is JSON, or else text",
    )


def find_tokenizer(config: EngineConfig, vocab_size: int, needed: bool) -> Tokenizer | None:
    """The tokenizer of --tokenizer, or of the folder that the model is or lies in.

    None if there is none and it is not `needed`. TextError as of `load`.
    """
    folder = Path(config.tokenizer)
    if not config.tokenizer:
        path = Path(config.model)
        folder = path if path.is_dir() else path.parent
        if not needed and not any((folder / name).exists() for name in CODECS):
            return None
    return load(folder, vocab_size)


def template_variables(chosen: argparse.Namespace) -> dict[str, Any]:
    """The chat template's variables of --template-set. ValueError for one without a name."""
    found = {}
    for setting in chosen.template_set:
        name, sign, value = setting.partition("=")
        if not name or not sign:
            raise ValueError(f"--template-set {setting!r}: must be NAME=VALUE, such as thinking=false")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


class Chat:
    """Conversations by a chat template, with the flags' system message and variables."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, chosen: argparse.Namespace) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._variables = template_variables(chosen)
        self._system: list[Message] = [] if chosen.system is None else [{"role": "system", "content": chosen.system}]

    def ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids that ask for the answer to `messages`."""
        parts = self._template.render([*self._system, *messages], variables=self._variables)
        return tuple(self._tokenizer.encode_parts(parts))

    def parser(self, prompt: Sequence[int]) -> AnswerParser:
        """For the answer to a prompt of `ids`."""
        form = find_format(self._tokenizer, self._template.source)
        return AnswerParser(self._tokenizer, form, is_thinking(self._tokenizer, prompt))


class Answer:
    """One request's text, given to `show` as it comes. parser: tells its parts apart, for `message`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Iterable[int],
        stops: Sequence[str],
        show: Callable[[str], None],
        parser: AnswerParser | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._parser = parser
        self._stream = TextStream(tokenizer, frozenset(stop_ids), stops, parser.marks if parser else ())
        self._show = show
        self._deltas: list[Delta] = []
        self.text = ""

    @property
    def used(self) -> int:
        """Tokens up to the end of the text."""
        return self._stream.used

    @property
    def is_cut(self) -> bool:
        """Whether a stop string has come, so that the request must be ended: the engine knows only stop tokens."""
        return self._stream.found is not None

    def take(self, message: Tokens) -> bool:
        """Grow by these tokens; `is_cut`."""
        self._grow(self._stream.pieces(message.tokens))
        return self.is_cut

    def end(self) -> None:
        """Show the rest, when no more tokens come."""
        self._grow([self._stream.finish()])
        if self._parser:
            self._deltas += self._parser.finish()

    def _grow(self, pieces: Sequence[str | int]) -> None:
        if self._parser:
            self._deltas += self._parser.push(pieces)
        text = "".join(p if isinstance(p, str) else self._tokenizer.decode([p]) for p in pieces)
        if text:
            self.text += text
            self._show(text)

    def cut(self, done: Completion) -> Completion:
        """The completion without what came after a stop string, which the engine does not know."""
        return dataclasses.replace(
            done,
            tokens=done.tokens[: self.used],
            finish_reason="stop" if self._stream.stopped else done.finish_reason,
            usage=msgspec.structs.replace(done.usage, completion_tokens=self.used),
            logits=None if done.logits is None else done.logits[: self.used],
            logprobs=done.logprobs[: self.used],
        )

    def message(self) -> Message:
        """As a turn of the conversation: chat templates want thinking and calls apart."""
        said = "".join(d.text for d in self._deltas if isinstance(d, Content))
        thought = "".join(d.text for d in self._deltas if isinstance(d, Reasoning))
        turn: dict[str, Any] = {"role": "assistant", "content": said}
        if thought:
            turn["reasoning_content"] = thought
        calls = [self._call(delta) for delta in self._deltas if isinstance(delta, CallBegin)]
        return turn | {"tool_calls": calls} if calls else turn

    def _call(self, begin: CallBegin) -> dict[str, Any]:
        mine = (d for d in self._deltas if isinstance(d, Arguments) and d.index == begin.index)
        function = {"name": begin.name, "arguments": "".join(d.text for d in mine)}
        return {"id": begin.id, "type": "function", "function": function}
