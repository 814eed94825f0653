"""What a model's answer consists of: content, reasoning and tool calls, told apart as it grows.

The parser gets texts and control ids (`TextStream.pieces`), so text that only looks like a control token is text, and
how the answer is split into pieces makes no difference.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kdtp.text.tokenizer import Tokenizer

THINK = ("<think>", "</think>")
FENCE = "```"


@dataclass(frozen=True)
class Content:
    """More of what is said to the user."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins; calls are counted from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Arguments:
    """More of a call's arguments: JSON, as far as the model writes it right."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A tool call is complete. One that the answer's end cuts off has none."""

    index: int


Delta = Content | Reasoning | CallBegin | Arguments | CallEnd


@dataclass(frozen=True)
class Format:
    """How a family writes tool calls: names of the control tokens, and what stands where.

    has_ids: the head before `separator` is the call's id, functions.NAME:INDEX (Kimi); else it is the name
    (DeepSeek-V3.1). fenced: name and arguments both follow the separator, the arguments in a ```json block
    (DeepSeek-V3 and R1).
    """

    section_begin: str
    section_end: str
    call_begin: str
    separator: str
    call_end: str
    has_ids: bool = False
    fenced: bool = False


KIMI = Format(
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    has_ids=True,
)
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
)
DEEPSEEK_V3 = Format(*_DEEPSEEK, fenced=True)
DEEPSEEK_V31 = Format(*_DEEPSEEK)


def find_format(tokenizer: Tokenizer, template: str) -> Format | None:
    """The format of a model, by its control tokens and its chat template; None if it has none that we know."""
    if KIMI.call_begin in tokenizer.controls:
        return KIMI
    if DEEPSEEK_V3.call_begin in tokenizer.controls:
        return DEEPSEEK_V3 if FENCE in template else DEEPSEEK_V31
    return None


def is_thinking(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether a prompt ends with the begin of thinking, so that the answer starts in the middle of it."""
    for token in reversed(prompt):
        if token == tokenizer.controls.get(THINK[0]):
            return True
        if tokenizer.token_bytes(token).strip():
            return False
    return False


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class AnswerParser:
    """Tells the parts of one answer apart. `marks` are the ids that the TextStream must give as themselves.

    thinking: the answer starts in the middle of it. new_id: gives the id of a call whose format has none. Bad input
    gives no error, since it is a model that writes it: a call without a name is content, a section or a call that
    is not closed ends where the next one begins, and calls outside of a section count.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: Format | None,
        thinking: bool = False,
        new_id: Callable[[], str] = _new_id,
    ) -> None:
        self._names = {token: name for name, token in tokenizer.controls.items()}
        self._format = format
        wanted = [*THINK, *_names(format)]
        self.marks = frozenset(tokenizer.controls[name] for name in wanted if name in tokenizer.controls)
        self._new_id = new_id
        self._state = self._reasoning if thinking else self._content
        self._held = ""
        self.calls = 0

    def push(self, pieces: Iterable[str | int]) -> list[Delta]:
        """What these pieces tell."""
        deltas: list[Delta] = []
        for piece in pieces:
            if piece != "":
                deltas += self._state(piece) if isinstance(piece, str) else self._mark(self._names[piece])
        return deltas

    def finish(self) -> list[Delta]:
        """The rest, when no more pieces come."""
        return self._close(complete=False)

    # ------------------------------------------------------------------ states: what a text means

    def _content(self, text: str) -> list[Delta]:
        return [Content(text)]

    def _reasoning(self, text: str) -> list[Delta]:
        return [Reasoning(text)]

    def _between(self, text: str) -> list[Delta]:
        """Between calls: spaces at the end are nothing, anything else is content."""
        self._held += text
        kept = self._held.rstrip()
        self._held = self._held[len(kept) :]
        return [Content(kept)] if kept else []

    def _head(self, text: str) -> list[Delta]:
        """Before the separator: kept until it comes."""
        self._held += text
        return []

    def _fenced_name(self, text: str) -> list[Delta]:
        """After the separator, up to the end of the line: the name."""
        self._held += text
        name, line_end, rest = self._held.partition("\n")
        if not line_end:
            return []
        self._held = ""
        deltas = self._begin(name, "")
        return deltas + (self._state(rest) if rest else [])

    def _fence(self, text: str) -> list[Delta]:
        """The line that opens the block of arguments; without one they begin at once."""
        self._held += text
        line, line_end, rest = self._held.lstrip().partition("\n")
        if (line.startswith(FENCE) and not line_end) or FENCE.startswith(line + line_end):
            return []
        text, self._held, self._state = rest if line.startswith(FENCE) else self._held, "", self._fenced
        return self._fenced(text)

    def _fenced(self, text: str) -> list[Delta]:
        """Arguments, but for what may be the closing line."""
        self._held += text
        kept = self._held.rstrip()
        kept = kept[: len(kept) - min(len(kept) - len(kept.rstrip("`")), len(FENCE))].rstrip()
        self._held = self._held[len(kept) :]
        return [Arguments(self.calls - 1, kept)] if kept else []

    def _arguments(self, text: str) -> list[Delta]:
        return [Arguments(self.calls - 1, text)]

    # ------------------------------------------------------------------ marks: from state to state

    def _mark(self, name: str) -> list[Delta]:
        form = self._format
        if name in THINK:
            return self._think(name)
        assert form is not None, name
        in_call = self._state in (self._arguments, self._fenced, self._fence, self._fenced_name)
        if name == form.separator:
            return self._separate(form) if self._state == self._head else self._state(name) if in_call else []
        deltas = self._close(complete=in_call)
        if name == form.call_begin:
            self._state = self._head
        elif name != form.section_end:
            self._state = self._between
        return deltas

    def _think(self, name: str) -> list[Delta]:
        if self._state not in (self._content, self._reasoning, self._between):
            return self._state(name)  # in a call it is a text like any other
        deltas = self._close(complete=False)
        if name == THINK[0]:
            self._state = self._reasoning
        return deltas

    def _separate(self, form: Format) -> list[Delta]:
        head, self._held = self._held.strip(), ""
        if form.fenced:
            self._state = self._fenced_name
            return []
        if form.has_ids:
            return self._begin(_name_of(head), head)
        return self._begin(head, "")

    def _begin(self, name: str, call_id: str) -> list[Delta]:
        """Arguments follow, of a call if there is a name."""
        form = self._format
        assert form is not None
        if not name.strip():
            self._state = self._content
            return []
        self._state = self._fence if form.fenced else self._arguments
        self.calls += 1
        return [CallBegin(self.calls - 1, call_id or self._new_id(), name.strip())]

    def _close(self, complete: bool) -> list[Delta]:
        """Leave the state we are in, for that of content: what it held back, and a call's end if it is complete."""
        state, held = self._state, self._held
        self._state, self._held = self._content, ""
        deltas: list[Delta] = []
        if state in (self._head, self._fenced_name):
            return [Content(held)] if held.strip() else []
        if state == self._fence and held.strip() and not held.lstrip().startswith(FENCE):
            deltas.append(Arguments(self.calls - 1, held))
        if complete:
            deltas.append(CallEnd(self.calls - 1))
        return deltas


def _names(format: Format | None) -> tuple[str, ...]:
    if format is None:
        return ()
    return (format.section_begin, format.section_end, format.call_begin, format.separator, format.call_end)


def _name_of(call_id: str) -> str:
    """NAME of functions.NAME:INDEX."""
    name, colon, index = call_id.removeprefix("functions.").rpartition(":")
    return name if colon and index.isdecimal() else call_id.removeprefix("functions.")
