"""Tools of a chat: which the model is shown, and which it must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kdtp.server.bodies import NamedTool, Tool
from kdtp.server.errors import ApiError
from kdtp.text.forced import MOST_CALLS

Choice = str | NamedTool | None
Function = Mapping[str, Any]


class Must(NamedTuple):
    """Which functions are to be called, and how often at most; free: if any is called at all."""

    functions: Sequence[Function]
    most: int
    free: bool = False


def shown(given: Sequence[Tool] | None, choice: Choice) -> list[dict[str, Any]] | None:
    """As chat templates read them; None where the model is to see none."""
    functions = _functions(given)
    return [{"type": "function", "function": f} for f in functions] if functions and choice != "none" else None


def must_call(given: Sequence[Tool] | None, choice: Choice) -> Must | None:
    """What the answer must be made of, if tool_choice says so; or its calls, if it may have any and one is strict."""
    functions = _functions(given)
    if choice in (None, "none", "auto"):
        strict = choice != "none" and any(function.get("strict") for function in functions)
        return Must([_loose(function) for function in functions], MOST_CALLS, free=True) if strict else None
    if not functions:
        raise ApiError(400, "tool_choice: needs tools", "tool_choice")
    if not isinstance(choice, NamedTool):
        return Must(functions, MOST_CALLS)
    name = choice.function.name
    named = [f for f in functions if f["name"] == name]
    if not named:
        raise ApiError(400, f"tool_choice.function.name = {name[:64]!r}: is none of the tools", "tool_choice")
    return Must(named[:1], 1)


def _loose(function: Function) -> Function:
    """Any arguments at all, unless it is strict."""
    return function if function.get("strict") else {"name": function["name"]}


def _functions(given: Sequence[Tool] | None) -> list[dict[str, Any]]:
    for i, tool in enumerate(given or ()):
        if tool.type != "function":
            raise ApiError(400, f"tools[{i}].type = {tool.type[:64]!r}: must be 'function'", f"tools[{i}].type")
        if tool.function is None:
            raise ApiError(400, f"tools[{i}].function: is missing", f"tools[{i}].function")
    return [_filled(tool.function) for tool in given or ()]


def _filled(struct: Any) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(struct).items() if value is not None}
