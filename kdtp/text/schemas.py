"""JSON schemas that no text can match: what they demand leads back to itself before any value ends."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

Wanted = list[tuple[str, Any]]  # what a schema demands: the reference that leads there, if one does, and the schema
_MOST_NAMES = 8  # references of a loop that are shown


def endless(schema: Mapping[str, Any]) -> str:
    """The references of a loop that every value of the schema would have to go round for ever, "#/$defs/a -> …"; empty
    if there is none.

    Counted from the leaves up (Dowling and Gallier 1984), so that its time is that of reading the schema. What is not
    understood here counts as something that ends: the grammar's compiler has its own word on it.
    """
    demands = _demands(schema)
    users: defaultdict[int, list[int]] = defaultdict(list)
    missing = {}  # of each schema: how many of those it demands must still be seen to end
    for place, (value, wanted) in demands.items():
        missing[place] = min(1, len(wanted)) if isinstance(value, list) else len(wanted)
        for _, child in wanted:
            users[id(child)].append(place)
    ended = [place for place, count in missing.items() if count == 0]
    while ended:
        for user in users[ended.pop()]:
            missing[user] -= 1
            if missing[user] == 0:
                ended.append(user)
    return _loop(schema, demands, missing) if missing[id(schema)] > 0 else ""


def _loop(schema: Any, demands: Mapping[int, tuple[Any, Wanted]], missing: Mapping[int, int]) -> str:
    names: list[str] = []
    seen: dict[int, int] = {}
    while id(schema) not in seen:
        seen[id(schema)] = len(names)
        name, schema = next((n, child) for n, child in demands[id(schema)][1] if missing[id(child)] > 0)
        names.append(name)
    loop = [name[:64] for name in names[seen[id(schema)] :] if name]
    return " -> ".join([*loop[:_MOST_NAMES], *["…"] * (len(loop) > _MOST_NAMES), loop[0]])


def _demands(root: Any) -> dict[int, tuple[Any, Wanted]]:
    """What each schema demands that is demanded itself, by identity; a list is that of an anyOf: one is enough."""
    found: dict[int, tuple[Any, Wanted]] = {}
    waiting = [root]
    while waiting:
        value = waiting.pop()
        if id(value) not in found:
            wanted = _wanted(root, value)
            found[id(value)] = value, wanted
            waiting += [child for _, child in wanted]
    return found


def _wanted(root: Any, schema: Any) -> Wanted:
    if isinstance(schema, list):
        return [("", one) for one in schema]
    if not isinstance(schema, dict):
        return []
    inner = [schema[key] for key in ("anyOf", "oneOf") if isinstance(schema.get(key), list)]
    inner += _list(schema.get("allOf"))
    if schema.get("type") == "object" and isinstance(schema.get("properties"), dict):
        names = [name for name in _list(schema.get("required")) if isinstance(name, str)]
        inner += [schema["properties"][name] for name in names if name in schema["properties"]]
    least = schema.get("minItems")
    if schema.get("type") == "array" and isinstance(least, int):
        first = _list(schema.get("prefixItems"))
        inner += first[: max(0, least)] + [schema.get("items")] * (least > len(first))
    wanted = [("", one) for one in inner]
    ref = schema.get("$ref")
    return [*wanted, (ref, _find(root, ref))] if isinstance(ref, str) else wanted


def _find(root: Any, ref: str) -> Any:
    """What a reference within the document names; None if it names nothing here."""
    start, *steps = ref.split("/")
    found = root if start == "#" else None
    for step in steps:
        name = unquote(step).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isascii() and name.isdecimal() and int(name[:9]) < len(found):
            found = found[int(name)]
        else:
            found = found.get(name) if isinstance(found, dict) else None
    return found


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
