"""Values that come from a file, a message or the command line: checked where they are made, refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import reprlib
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec

C = TypeVar("C")


class ConfigError(ValueError):
    """A configuration value that cannot be; the text names it and what is legal, `key` is its name alone."""

    def __init__(self, text: str, key: str = "") -> None:
        super().__init__(text)
        self.key = key


def want(ok: bool, key: str, value: object, legal: str) -> None:
    """Raise ConfigError unless it is ok."""
    if not ok:
        raise ConfigError(f"{key} = {reprlib.repr(value)}: must be {legal}", key)


class Range(NamedTuple):
    """The legal values of a field, ends included: Annotated[int, Range(1, 8)]."""

    least: float
    most: float


def want_in(least: float, most: float, key: str, value: float) -> None:
    want(least <= value <= most, key, value, f"{least}..{most}")  # NaN is in no range


def check_ranges(config: object, prefix: str = "") -> None:
    """Raise ConfigError for a field that is beyond its Range."""
    for key, hint in typing.get_type_hints(type(config), include_extras=True).items():
        for legal in getattr(hint, "__metadata__", ()):
            want_in(legal.least, legal.most, prefix + key, getattr(config, key))


def build(cls: type[C], values: Mapping[str, Any], source: str, origins: Mapping[str, str] | None = None) -> C:
    """Make a frozen config of plain values: types converted by msgspec, unknown keys refused by name.

    Raises ConfigError naming the key and where its value comes from: origins[key] ("drafter.rank" for a nested one)
    or else `source`.
    """
    refuse_unknown(cls, values, source)
    try:
        return msgspec.convert(dict(values), cls, strict=False)
    except msgspec.ValidationError as error:
        key, text = _explain(error)
        raise ConfigError(f"{(origins or {}).get(key, source)}: {text}", key) from None


def _explain(error: msgspec.ValidationError) -> tuple[str, str]:
    """Key and text of what msgspec found, or of the ConfigError that it wraps."""
    if isinstance(error.__cause__, ConfigError):
        return error.__cause__.key, str(error.__cause__)
    found = re.fullmatch(r"(.*?)(?: - at `\$\.(.*)`)?", str(error), re.DOTALL)
    assert found is not None
    text, key = found.groups()
    return key or "", f"{key}: {text}" if key else text


def refuse_unknown(cls: Any, values: Mapping[str, Any], source: str) -> None:
    """ConfigError for a key that is no field of the dataclass, nor of those in it."""
    # msgspec ignores unknown keys of a dataclass, nested ones too.
    hints = typing.get_type_hints(cls)
    for key, value in values.items():
        if key not in hints:
            raise ConfigError(f"{source}: unknown key {key!r}; known are {', '.join(sorted(hints))}")
        for kind in (hints[key], *typing.get_args(hints[key])):
            if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
                refuse_unknown(kind, value, f"{source}: {key}")


def digest(config: Any) -> str:
    """sha256 of a config's values; equal on two processes exactly if their configs are."""
    return hashlib.sha256(json.dumps(dataclasses.asdict(config), sort_keys=True).encode()).hexdigest()
