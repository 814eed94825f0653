"""How a model's authors want it to be sampled where a request does not say: generation_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec.structs import replace

from kdtp.text.files import TextError, read_json
from kdtp.types import SamplingParams

FILE = "generation_config.json"
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read(model: Path) -> Mapping[str, float]:
    """Of a model folder, or of the folder that a model file lies in; empty if it says nothing. TextError naming file,
    field and value."""
    path = (model if model.is_dir() else model.parent) / FILE
    found = {name: value for name, value in read_json(path).items() if name in _FIELDS and value is not None}
    for name, value in found.items():
        wanted = int if name == "top_k" else (int, float)
        if isinstance(value, bool) or not isinstance(value, wanted):
            raise TextError(f"{path}: {name} = {value!r}: must be a number")
        try:
            replace(SamplingParams(), **{name: value})
        except ValueError as error:
            raise TextError(f"{path}: {error}") from None
    return found
