"""The line that says how far loading is."""

from __future__ import annotations

import io

import pytest

from kdtp.engine import progress
from kdtp.engine.progress import LoadLine, Meter


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bytes_rate_and_time_left():
    clock = Clock()
    meter = Meter(clock)
    assert meter.text(0, 0) == "0 bytes of 0 bytes"
    assert meter.text(0, 400_000_000_000) == "0 bytes of 400.00 GB"
    clock.now += 10
    assert meter.text(20_000_000_000, 400_000_000_000) == "20.00 GB of 400.00 GB, 2.00 GB/s, 3:10 left"
    clock.now += 190
    assert meter.text(400_000_000_000, 400_000_000_000) == "400.00 GB of 400.00 GB, 2.00 GB/s"


def test_a_terminal_has_one_line_that_is_redrawn():
    clock, terminal = Clock(), Terminal()
    line = LoadLine(terminal, clock)
    for done in range(1001):
        clock.now += 0.01
        line.show(done * 1000, 1_000_000)
    line.show(1_000_000, 1_000_000)
    states = terminal.getvalue().split("\r\x1b[K")
    assert 45 <= len(states) <= 60  # 10 seconds, five a second
    assert states[-1] == "loading: 1.00 MB of 1.00 MB, 100.00 kB/s\n"
    assert terminal.getvalue().count("\n") == 1


def test_elsewhere_a_line_every_ten_seconds(monkeypatch: pytest.MonkeyPatch):
    shown: list[str] = []
    monkeypatch.setattr(progress.logger, "info", lambda form, *values: shown.append(form % values))
    clock, stream = Clock(), io.StringIO()
    line = LoadLine(stream, clock)
    for second in range(31):
        line.show(second, 30)
        clock.now += 1
    assert stream.getvalue() == ""
    assert (
        len(shown) == 4
        and shown[0] == "loading: 0 bytes of 30 bytes"
        and shown[-1].endswith("30 bytes of 30 bytes, 1 bytes/s")
    )
