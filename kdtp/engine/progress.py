"""How far loading is, as one line for all ranks: bytes, rate, time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from kdtp.log import amount, logger

_REDRAW = 0.2  # seconds between two states of the line on a terminal
_RELOG = 10.0  # seconds between two lines elsewhere


class Meter:
    """Turns bytes done and to do into text; the rate is that since the first bytes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: tuple[float, int] | None = None

    def text(self, done: int, total: int) -> str:
        """For example "12.30 GB of 595.12 GB, 2.10 GB/s, 4:37 left"."""
        text, now = f"{amount(done)} of {amount(total)}", self._clock()
        if self._began is None:
            self._began = now, done
        since, first = self._began
        if done <= first or now <= since:
            return text
        rate = (done - first) / (now - since)
        left = round((total - done) / rate)
        return f"{text}, {amount(rate)}/s" + (f", {left // 60}:{left % 60:02} left" if done < total else "")


class LoadLine:
    """The coordinator's line: drawn in place on a terminal, else now and then a line of the log."""

    def __init__(self, stream: TextIO = sys.stderr, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._meter = Meter(clock)
        self._pause = _REDRAW if stream.isatty() else _RELOG
        self._shown_at = -self._pause
        self._shown = (0, 0)

    def show(self, done: int, total: int) -> None:
        """Bytes of weights loaded so far and to load, over all ranks."""
        end, now = 0 < total == done, self._clock()
        if (done, total) == self._shown or (now < self._shown_at + self._pause and not end):
            return
        self._shown, self._shown_at = (done, total), now
        text = f"loading: {self._meter.text(done, total)}"
        if self._stream.isatty():
            self._stream.write(f"\r\x1b[K{text}" + ("\n" if end else ""))
            self._stream.flush()
        else:
            logger.info("%s", text)
