"""Tools of a chat: which the model is shown, and which it must call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from kdtp.server.bodies import NamedTool, Tool, ToolFunction
from kdtp.server.errors import ApiError
from kdtp.text.forced import MOST_CALLS

Choice = str | NamedTool | None
Function = Mapping[str, Any]


class Must(NamedTuple):
    """Which functions are to be called, and how often at most; free: if any is called at all. field: what asks for
    it."""

    functions: Sequence[Function]
    most: int
    free: bool = False
    field: str = "tool_choice"


def shown(given: Sequence[Tool] | None, choice: Choice) -> list[dict[str, Any]] | None:
    """As chat templates read them; None where the model is to see none."""
    functions = _functions(given)
    return [{"type": "function", "function": f} for f in functions] if functions and choice != "none" else None


def must_call(given: Sequence[Tool] | None, choice: Choice, parallel: bool | None = None) -> Must | None:
    """What the answer must be made of, if tool_choice says so; or its calls, if it may have any, and one is strict or
    only one may come (parallel is False)."""
    functions = _functions(given)
    most = 1 if parallel is False else MOST_CALLS
    if choice in (None, "none", "auto"):
        field = "parallel_tool_calls" if parallel is False else "tools[].function.strict"
        held = choice != "none" and functions and (parallel is False or any(f.get("strict") for f in functions))
        return Must([_loose(function) for function in functions], most, True, field) if held else None
    if not functions:
        raise ApiError(400, "tool_choice: needs tools", "tool_choice")
    if not isinstance(choice, NamedTool):
        return Must(functions, most)
    name = choice.function.name
    named = [f for f in functions if f["name"] == name]
    if not named:
        raise ApiError(400, f"tool_choice.function.name = {name[:64]!r}: is none of the tools", "tool_choice")
    return Must(named[:1], 1)


def _loose(function: Function) -> Function:
    """Any arguments at all, unless it is strict."""
    return function if function.get("strict") else {"name": function["name"]}


def _functions(given: Sequence[Tool] | None) -> list[dict[str, Any]]:
    seen: set[str] = set()
    for i, tool in enumerate(given or ()):
        if tool.type != "function":
            raise ApiError(400, f"tools[{i}].type = {tool.type[:64]!r}: must be 'function'", f"tools[{i}].type")
        if tool.function is None:
            raise ApiError(400, f"tools[{i}].function: is missing", f"tools[{i}].function")
        _check(f"tools[{i}].function", tool.function, seen)
    return [_filled(tool.function) for tool in given or ()]


def _check(where: str, function: ToolFunction, seen: set[str]) -> None:
    kind = (function.parameters or {}).get("type", "object")
    if kind != "object":
        at = f"{where}.parameters.type"
        raise ApiError(400, f"{at} = {str(kind)[:64]!r}: must be 'object'", at)
    if function.name in seen:
        raise ApiError(400, f"{where}.name = {function.name!r}: is the name of another tool, too", f"{where}.name")
    seen.add(function.name)


def _filled(struct: Any) -> dict[str, Any]:
    return {key: value for key, value in msgspec.to_builtins(struct).items() if value is not None}
