"""What a finished run leaves for people: the loss curve as a picture, and a model card."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.figure

from kdtp import files
from kdtp.log import amount
from kdtp.train import journal

_LICENCE = """The text is part of Python, © Python Software Foundation, and is used under the PSF License Agreement
(https://docs.python.org/3/license.html). The weights are derived from it and come under the same terms."""


def plot(path: Path, log: Path, title: str) -> None:
    """Draw the losses of loss.jsonl over the steps."""
    lines = journal.read(log)
    steps, losses = zip(*((line["step"], line["loss"]) for line in lines if "loss" in line), strict=True)
    held_out = [(line["step"], line["held_out"]["loss"]) for line in lines if "held_out" in line]
    figure = matplotlib.figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, losses, color="0.75", linewidth=0.5)
    axes.plot(steps, _smooth(losses), label="training")
    axes.plot(*zip(*held_out, strict=True), marker=".", label="held-out")
    top = sorted(losses)[int(0.98 * (len(losses) - 1))]  # the first steps would flatten the rest
    axes.set(xlabel="step", ylabel="loss, nats per token", title=title, ylim=(0, 1.1 * top))
    axes.grid(alpha=0.3)
    axes.legend()
    with files.replacing(path) as file:
        figure.savefig(file, format="png", dpi=110)


def _smooth(losses: tuple[float, ...]) -> list[float]:
    """A moving average over the last 2 % or so."""
    keep, mean, out = 1 - 1 / max(1.0, len(losses) / 50), losses[0], []
    for loss in losses:
        mean = keep * mean + (1 - keep) * loss
        out.append(mean)
    return out


def write(path: Path, title: str, about: str, facts: Mapping[str, Any], command: str) -> None:
    """MODEL_CARD.md: what the network is, `facts` of its training, licence, how to make it again."""
    facts = {**facts, "run with": f"Python {platform.python_version()}"}
    lines = "\n".join(f"| {name} | {value} |" for name, value in facts.items())
    files.write(
        path,
        f"""# {title}

{about}

| | |
|---|---|
{lines}

![loss](loss.png)

## Licence

{_LICENCE}

## Again

```
{command}
```
""",
    )


def size(folder: Path) -> str:
    """Bytes of a folder's own files, without those below."""
    return amount(sum(path.stat().st_size for path in folder.iterdir() if path.is_file()))


def figures(values: Mapping[str, float]) -> str:
    """Figures of held-out text in a line."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in values.items())


def plain(value: Any) -> str:
    """A small object in a line."""
    return json.dumps(value).strip("{}").replace('"', "")
