"""The pair that ships: a small target that writes Python and its DFlash 2 drafter, in the published layouts.

Where a model is asked for, the name "pair" is this target, and where a drafter's folder is, this drafter; a folder of
one's own that is called so is ./pair. How it was made is in the model cards.
"""

from __future__ import annotations

from pathlib import Path

NAME = "pair"
TARGET = Path(__file__).parent / "target"
DRAFTER = Path(__file__).parent / "drafter"


def target(model: str) -> Path:
    """The absolute path of a target: the shipped one if `model` is its name."""
    return TARGET if model == NAME else Path(model).absolute()


def drafter(model: str) -> Path:
    """The absolute path of a drafter's folder, as `target`."""
    return DRAFTER if model == NAME else Path(model).absolute()
