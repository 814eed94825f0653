"""What `kdtp generate` shows: a progress bar for loading and for tokens, tokens or text as they come, the figures."""

from __future__ import annotations

import sys
from functools import partial
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kdtp.cli.check import Verdict
from kdtp.engine.api import Completion
from kdtp.engine.progress import Meter
from kdtp.messages import Tokens


class Screen:
    """Progress bars on a terminal's stderr, plain lines elsewhere. To stdout: the tokens, a line per round, or with
    `as_text` the text and nothing else, behind `echo`."""

    def __init__(self, max_tokens: int, quiet: bool, as_text: bool = False, echo: str = "") -> None:
        self._quiet = quiet
        self._echo = echo
        self._as_text = as_text
        self._printed = ""
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=quiet or not sys.stderr.isatty(),
        )
        self._meter = Meter()
        self._load = self._bars.add_task("loading ", amount="")
        self._tokens = self._bars.add_task("tokens  ", amount="", total=max_tokens, visible=False, start=False)
        self._announced = quiet or sys.stderr.isatty()

    def load(self, done: int, total: int) -> None:
        """Bytes of weights loaded so far, over all ranks."""
        text = self._meter.text(done, total)
        self._bars.update(self._load, completed=done, total=total or None, amount=text)
        if total and done == total and not self._announced:
            self._announced = True
            print(f"loaded {text}", file=sys.stderr)

    def tokens(self, index: int, message: Tokens) -> None:
        """Tokens of one round."""
        if self._as_text:
            return
        count = message.position + len(message.tokens)
        if not message.position:
            self._bars.update(self._load, visible=False)
            self._bars.start_task(self._tokens)
        self._bars.update(self._tokens, completed=count, visible=True, amount=f"{count}")
        if not self._quiet:
            print(f"{message.position:>6} +{len(message.tokens)}  {' '.join(map(str, message.tokens))}", flush=True)

    def text(self, text: str) -> None:
        """More of the text. The bars make room for it."""
        self._bars.stop()
        text, self._echo = self._echo + text, ""
        if not self._quiet:
            print(text if not sys.stdout.isatty() else printable(text), end="", flush=True)
            self._printed = text

    def __enter__(self) -> Screen:
        self._bars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bars.stop()
        if self._printed and not self._printed.endswith("\n"):
            print()


_CONTROLS = {i: "\ufffd" for i in (*range(0x20), *range(0x7F, 0xA0)) if chr(i) not in "\t\n"}


def printable(text: str) -> str:
    """Text for a terminal: what a model writes cannot move the cursor or change a setting."""
    return text.translate(_CONTROLS)


def report(done: Completion, verdict: Verdict | None, method: str, file: TextIO) -> None:
    """The figures of a completion."""
    usage = done.usage
    tell = partial(print, file=file)
    tell(f"tokens    {usage.completion_tokens} after a prompt of {usage.prompt_tokens}; finished: {done.finish_reason}")
    if usage.rounds:
        per_round = usage.committed / usage.rounds
        tell(
            f"rounds    {usage.rounds} (and {usage.forwards - usage.rounds} prefill); {per_round:.2f} tokens committed "
            f"per round (root + {per_round - 1:.2f} accepted)"
        )
    if usage.drafted_by_depth:
        pairs = zip(usage.accepted_by_depth, usage.drafted_by_depth, strict=True)
        tell("accepted  " + "  ".join(f"{d}: {a}/{n}" for d, (a, n) in enumerate(pairs, 1)) + "  (by depth)")
    tell("time      " + ", ".join(f"{stage} {ms:.2f}" for stage, ms in usage.timings_ms.items()) + " ms")
    if verdict is not None:
        tell(verdict.line(method))
