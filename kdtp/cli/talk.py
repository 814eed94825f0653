"""The loop of a conversation on the terminal: lines in, commands, Ctrl-C."""

from __future__ import annotations

import abc
import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType

from kdtp.text.template import Message

EXIT_INTERRUPTED = 130
HELP = "/reset begins a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


class Interrupts:
    """Ctrl-C: ends the input line, or while `answering` the answer; a second time in one answer, the program."""

    def __init__(self) -> None:
        self.stopped = False
        self._answering = False

    def __enter__(self) -> Interrupts:
        self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Nothing is interrupted in here, since the engine must finish its step; `stopped` tells of Ctrl-C."""
        self.stopped, self._answering = False, True
        try:
            yield
        finally:
            self._answering = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._answering:
            raise KeyboardInterrupt
        if self.stopped:
            raise SystemExit(EXIT_INTERRUPTED)
        self.stopped = True


class Talk(abc.ABC):
    """What was said, and the loop that adds to it. Answers go to stdout, everything else to stderr."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._interrupts = Interrupts()

    @abc.abstractmethod
    def _answer(self, line: str) -> None:
        """Answer a line, and remember both. ValueError: this turn failed, the conversation is as it was before."""

    def talk(self) -> None:
        """Read lines and answer them, until the input ends."""
        on_terminal = sys.stdin.isatty()
        if on_terminal:
            import readline  # noqa: F401  gives `input` its line editing

            print(HELP, file=sys.stderr)
        with self._interrupts:
            while True:
                try:
                    line = input("> " if on_terminal else "").strip()
                    if line == "/exit":
                        return
                    self._heed(line)
                except KeyboardInterrupt:
                    print(f"\n{HELP}", file=sys.stderr)
                except EOFError:
                    if on_terminal:
                        print(file=sys.stderr)
                    return

    def _heed(self, line: str) -> None:
        """Carry out a command, or answer."""
        if line == "/reset":
            self._messages.clear()
            print("a new conversation", file=sys.stderr)
        elif line.startswith("/") and len(line.split()) == 1:
            print(f"{line}: no such command; {HELP}", file=sys.stderr)
        elif line:
            try:
                self._answer(line)
            except ValueError as error:  # of this turn; the conversation is as it was before
                print(f"kdtp chat: {error}", file=sys.stderr)
