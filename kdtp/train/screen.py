"""What a training run shows: a bar on a terminal, and a line for every look at held-out text."""

from __future__ import annotations

from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Screen:
    """On stderr."""

    def __init__(self, title: str) -> None:
        self._console = Console(stderr=True)
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._bar = Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=self._console)
        self._task = self._bar.add_task(title, total=1.0, text="")
        self._speed = 0.0
        self._since: tuple[int, float] | None = None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """A line of its own."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def advance(self, part: float) -> None:
        """Move the bar by a part of what comes before the training."""
        self._bar.advance(self._task, part)

    def show(self, step: int, part: float, loss: float, seconds: float, tokens: int) -> None:
        """Move the bar. tokens: per step."""
        if self._since is not None and seconds > self._since[1]:
            speed = (step - self._since[0]) * tokens / (seconds - self._since[1])
            self._speed = speed if not self._speed else 0.9 * self._speed + 0.1 * speed
        self._since = step, seconds
        text = "  ".join((f"step {step}  loss {loss:.3f}", *self._rate()))
        self._bar.update(self._task, completed=min(part, 1.0), text=text)

    def held_out(self, step: int, figures: dict[str, float]) -> None:
        """A look at held-out text."""
        said = "  ".join(f"{name} {value:.4f}" for name, value in figures.items())
        self.say("  ".join((f"step {step}: held-out {said}", *self._rate())))

    def _rate(self) -> tuple[str, ...]:
        """Not known before the second look."""
        return (f"{self._speed:,.0f} tokens/s",) if self._speed else ()
