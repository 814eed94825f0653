"""One choice of an answer, from tokens to what is said: text, reasoning, tool calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from kdtp.messages import Tokens
from kdtp.text.calls import AnswerParser, Content, Delta, Reasoning
from kdtp.text.stream import TextStream
from kdtp.text.tokenizer import Tokenizer
from kdtp.types import Logprob


@dataclass(frozen=True)
class Grown:
    """What one event adds to a choice. reason: why the choice ends here, if it does."""

    deltas: Sequence[Delta] = ()
    tokens: Sequence[int] = ()
    logprobs: Sequence[Logprob] = ()
    reason: str | None = None


@dataclass
class Choice:
    """The text of one choice as its tokens come. Without a parser all of it is content."""

    tokenizer: Tokenizer
    stop_ids: Collection[int]
    stops: Sequence[str]
    parser: AnswerParser | None = None
    ended: bool = False
    _stream: TextStream = field(init=False)

    def __post_init__(self) -> None:
        marks = self.parser.marks if self.parser else ()
        self._stream = TextStream(self.tokenizer, self.stop_ids, self.stops, marks)

    @property
    def used(self) -> int:
        """Tokens up to the end of the text."""
        return self._stream.used

    def take(self, event: Tokens) -> Grown:
        """Grow by these tokens; a stop string ends the choice, whatever the engine does."""
        before = self._stream.used
        deltas = self._parse(self._stream.pieces(event.tokens))
        used = self._stream.used - before
        tokens, logprobs = event.tokens[:used], event.logprobs[:used]
        if self._stream.found is None:
            return Grown(_joined(deltas), tokens, logprobs)
        self.ended = True
        return Grown(_joined(deltas + self._rest()), tokens, logprobs, self._reason("stop"))

    def end(self, reason: str) -> Grown:
        """The rest, when the engine has ended the request."""
        self.ended = True
        held = self._stream.finish()
        deltas = self._parse([held] if held else []) + self._rest()
        return Grown(_joined(deltas), reason=self._reason("stop" if self._stream.stopped else reason))

    def _parse(self, pieces: Sequence[str | int]) -> list[Delta]:
        if self.parser:
            return self.parser.push(pieces)
        return [Content(piece) for piece in pieces if isinstance(piece, str)]

    def _rest(self) -> list[Delta]:
        return self.parser.finish() if self.parser else []

    def _reason(self, reason: str) -> str:
        return "tool_calls" if reason == "stop" and self.parser and self.parser.calls else reason


def _joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Texts of one kind that follow each other are one."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, Content) and isinstance(last, Content):
            joined[-1] = Content(last.text + delta.text)
        elif isinstance(delta, Reasoning) and isinstance(last, Reasoning):
            joined[-1] = Reasoning(last.text + delta.text)
        else:
            joined.append(delta)
    return joined
