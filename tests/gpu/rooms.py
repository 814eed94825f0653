"""The rooms of kernel cases: each module tests/gpu/cases_<room>.py, imported when its cases are asked for."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from tests.gpu.cases import Case


def names() -> list[str]:
    """All rooms."""
    return sorted(path.stem.removeprefix("cases_") for path in Path(__file__).parent.glob("cases_*.py"))


def cases(room: str) -> Iterator[Case]:
    """The cases of a room, made one by one. Raises ModuleNotFoundError for a room that is not."""
    found: Iterator[Case] = import_module(f"tests.gpu.cases_{room}").cases()
    return found


def check_fields(case: Case, struct: type[ctypes.Structure]) -> None:
    """Raise ValueError unless the case gives every number of the op's struct, and only pointers that it has."""
    kinds = {str(field[0]): field[1] for field in struct._fields_}
    pointers = {name for name, kind in kinds.items() if kind is ctypes.c_void_p} - {"stream", "workspace"}
    numbers = kinds.keys() - pointers - {"stream", "workspace", "workspace_bytes"}
    if case.scalars.keys() != numbers:
        raise ValueError(f"{case.name}: scalars {sorted(case.scalars)}: must be {sorted(numbers)}")
    given = [*case.inputs, *case.outputs]
    if len(set(given)) != len(given) or not pointers.issuperset(given):
        raise ValueError(f"{case.name}: arrays {given}: must be some of {sorted(pointers)}, each once")
