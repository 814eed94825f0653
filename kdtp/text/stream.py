"""Token ids in, text out, as an answer grows: whole characters only, nothing of what ends it."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Sequence

from kdtp.text.files import TextError, check_unicode
from kdtp.text.tokenizer import Tokenizer

MOST_STOPS = 32
LONGEST_STOPS = 4096  # characters, together


class Detokenizer:
    """Text of a growing list of token ids. However the list is split, the texts together are `Tokenizer.decode` of it.

    A character comes when its last byte has; hidden ids are passed over.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        """The text that is complete with these ids."""
        tokenizer = self._tokenizer
        return self._decoder.decode(b"".join(tokenizer.token_bytes(i) for i in ids if i not in tokenizer.hidden))

    def finish(self) -> str:
        """The rest: one U+FFFD if a character was left incomplete."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Lets text through up to the first of some strings, holding back what may become one.

    The first string to be complete counts; of several that are complete with the same character the longest. So it
    does not matter how the text is split. At most max(len) - 1 characters are held back.
    """

    def __init__(self, stops: Sequence[str] = ()) -> None:
        check_stops(stops)
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """What can be shown of the text so far and was not yet. Nothing after `found` is set."""
        if self.found is not None:
            return ""
        text = self._held + text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if ends:
            _, at, self.found = min(ends)
            self._held = ""
            return text[:at]
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _undecided(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


class TextStream:
    """The text of one answer as its tokens are decided, up to a stop token or a stop string.

    marks: ids that come as themselves instead of as text (see `pieces`). used: tokens taken, the one that ended it
    included. stopped: whether one has. found: the stop string, if it was one. Tokens may come in any groups: what
    they give together is the same.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Collection[int] = (),
        stops: Sequence[str] = (),
        marks: Collection[int] = (),
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop_ids = frozenset(stop_ids)
        self._strings = StopStrings(stops)
        self._marks = frozenset(marks)
        self._ended = False
        self.used = 0
        self.stopped = False

    @property
    def found(self) -> str | None:
        return self._strings.found

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; none of what follows a stop. Marks are left out."""
        return "".join(piece for piece in self.pieces(ids) if isinstance(piece, str))

    def pieces(self, ids: Iterable[int]) -> list[str | int]:
        """The texts that these tokens complete, and the marks between them. No stop string reaches across a mark."""
        found: list[str | int] = []
        for token in ids:
            if self.stopped:
                break
            self.used += 1
            if token in self._stop_ids:
                found.append(self.finish())
                self.stopped = True
            elif token in self._marks:
                found.append(self._flush())
                found += [] if self.stopped else [token]
            else:
                found.append(self._strings.push(self._detokenizer.push([token])))
                self.stopped = self.found is not None
        return [piece for piece in found if piece != ""]

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        if self._ended or self.stopped:
            return ""
        self._ended = True
        return self._flush()

    def _flush(self) -> str:
        text = self._strings.push(self._detokenizer.finish())
        self.stopped = self.found is not None
        return text + self._strings.finish()


def check_stops(stops: Sequence[str]) -> None:
    """TextError for stop strings that are empty, too many, too long or no Unicode."""
    if len(stops) > MOST_STOPS or sum(map(len, stops)) > LONGEST_STOPS:
        total = f"{len(stops)} strings of {sum(map(len, stops))} characters"
        raise TextError(f"stop: {total}: must be at most {MOST_STOPS} of {LONGEST_STOPS} together")
    for i, stop in enumerate(stops):
        if not stop:
            raise TextError(f"stop[{i}] = '': must be at least one character")
        check_unicode(stop, f"stop[{i}]")
