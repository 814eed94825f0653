"""Text around the engine's token ids: the tokenizer beside a model, prompts made of text, the answer as it grows."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kdtp.engine.api import Completion
from kdtp.messages import Tokens
from kdtp.text.stream import TextStream
from kdtp.text.template import ChatTemplate, Message
from kdtp.text.tokenizer import CODECS, Tokenizer, load


def add_text_flags(parser: argparse.ArgumentParser) -> None:
    """Add what concerns text."""
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="folder of the tokenizer files (default: where the model is)"
    )
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


def find_tokenizer(chosen: argparse.Namespace, model: str, vocab_size: int, needed: bool) -> Tokenizer | None:
    """The tokenizer of --tokenizer, or of the folder that the model is or lies in.

    None if there is none and it is not `needed`. TextError as of `load`.
    """
    folder: Path | None = chosen.tokenizer
    if folder is None:
        path = Path(model)
        folder = path if path.is_dir() else path.parent
        if not needed and not any((folder / name).exists() for name in CODECS):
            return None
    return load(folder, vocab_size)


def _variables(chosen: argparse.Namespace) -> dict[str, Any]:
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
        self._variables = _variables(chosen)
        self._system: list[Message] = [] if chosen.system is None else [{"role": "system", "content": chosen.system}]

    def ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids that ask for the answer to `messages`."""
        parts = self._template.render([*self._system, *messages], variables=self._variables)
        return tuple(self._tokenizer.encode_parts(parts))


class Answer:
    """One request's text, given to `show` as it comes."""

    def __init__(
        self, tokenizer: Tokenizer, stop_ids: Iterable[int], stops: Sequence[str], show: Callable[[str], None]
    ) -> None:
        self._stream = TextStream(tokenizer, frozenset(stop_ids), stops)
        self._show = show
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
        self._grow(self._stream.push(message.tokens))
        return self.is_cut

    def end(self) -> None:
        """Show the rest, when no more tokens come."""
        self._grow(self._stream.finish())

    def cut(self, done: Completion) -> Completion:
        """The completion without what came after a stop string, which the engine does not know."""
        logits = None if done.logits is None else done.logits[: self.used]
        usage = msgspec.structs.replace(done.usage, completion_tokens=self.used)
        reason = "stop" if self._stream.stopped else done.finish_reason
        return dataclasses.replace(
            done,
            tokens=done.tokens[: self.used],
            finish_reason=reason,
            usage=usage,
            logits=logits,
            logprobs=done.logprobs[: self.used],
        )

    def message(self) -> Message:
        """As a turn of the conversation. Chat templates want the thinking apart, or leave it out."""
        thought, end, said = self.text.partition("</think>")
        if not end:
            return {"role": "assistant", "content": self.text}
        thought = thought.removeprefix("<think>").strip("\n")
        return {"role": "assistant", "content": said.lstrip("\n"), "reasoning_content": thought}

    def _grow(self, text: str) -> None:
        if text:
            self.text += text
            self._show(text)
