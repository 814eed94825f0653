"""What the small JSON files of a model folder say about text: special tokens by role, and what ends an answer."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kdtp import files

ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


_LARGEST = 1 << 26  # bytes; tokenizer.json of DeepSeek-V3 has 8 MB


class TextError(ValueError):
    """A tokenizer file, a chat template or a text that cannot be used; the message names it and says why."""


def read_bytes(path: Path) -> bytes:
    """All of a file. TextError for one that cannot be read, or is far too large."""
    try:
        return files.read(path, _LARGEST)
    except OSError as error:
        raise TextError(f"{path}: {(error.strerror or str(error)).lower()}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. TextError for a file that holds anything else."""
    if not os.path.lexists(path):
        return {}
    data = read_bytes(path)
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TextError(f"{path}: {error}") from None
    if not isinstance(found, dict):
        raise TextError(f"{path}: must be a JSON object, is {reprlib.repr(found)}")
    return found


def check_unicode(text: str, what: str) -> None:
    """TextError for half a surrogate pair, which JSON may hold, or an argument of the command line that is no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = hex(ord(text[error.start]))
        raise TextError(f"{what}: {found} at character {error.start} is half a surrogate pair, no character") from None


def role_names(settings: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The names of special tokens by role ("bos_token") in a tokenizer_config.json: plain, or with flags beside."""
    names = {}
    for role in ROLES:
        value = settings.get(role)
        name = value.get("content") if isinstance(value, dict) else value
        if name is None:
            continue
        if not isinstance(name, str) or not name:
            raise TextError(f"{path}: {role} = {reprlib.repr(value)}: must be a token's name")
        names[role] = name
    return names


def end_ids(folder: Path) -> dict[int, str]:
    """Token ids that end an answer by generation_config.json or config.json, each with the file and key it is from."""
    ends: dict[int, str] = {}
    for name, *keys in (
        ("generation_config.json", "eos_token_id"),
        ("config.json", "eos_token_id"),
        ("config.json", "text_config", "eos_token_id"),
    ):
        value: Any = read_json(folder / name)
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        for token in _ids(value, f"{folder / name}: {'.'.join(keys)}"):
            ends.setdefault(token, f"{folder / name}: {'.'.join(keys)}")
    return ends


def _ids(value: Any, where: str) -> Iterator[int]:
    for token in value if isinstance(value, list) else [] if value is None else [value]:
        if type(token) is not int or token < 0:
            raise TextError(f"{where} = {reprlib.repr(value)}: must be a token id, or a list of them")
        yield token
