"""loss.jsonl: a line for every step's loss, and one for every look at held-out text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kdtp import files
from kdtp.config import ConfigError


class Journal:
    """The file of a run that has come to `step`: what a killed process wrote behind that is dropped.

    ConfigError as of `read`, and for a file without any of those steps.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        known = [line for line in read(path) if line["step"] <= step]
        if step and not known:
            raise ConfigError(f"{path}: has none of the checkpoint's {step} steps; put it back, or take another --out")
        files.write(path, "".join(map(_line, known)))

    def losses(self, first: int, losses: Sequence[float]) -> None:
        """Losses of the steps from `first` on."""
        self._add([{"step": step, "loss": round(loss, 5)} for step, loss in enumerate(losses, first)])

    def held_out(self, step: int, seconds: float, figures: dict[str, float]) -> None:
        """Figures of held-out text after a step."""
        self._add([{"step": step, "seconds": round(seconds, 1), "held_out": figures}])

    def _add(self, lines: Sequence[dict[str, Any]]) -> None:
        with files.naming(self.path), self.path.open("a", encoding="utf-8") as file:
            file.writelines(map(_line, lines))


def read(path: Path) -> list[dict[str, Any]]:
    """All lines; a last one that was cut off by a kill is dropped. ConfigError for one that is no line of a journal."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [_parsed(path, number, line) for number, line in enumerate(lines[:-1], 1)]


def _parsed(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        raise ConfigError(f"{path}: line {number} = {line[:80]!r}: must be an object with a step; take the line out")
    return found


def _line(value: dict[str, Any]) -> str:
    return json.dumps(value) + "\n"
