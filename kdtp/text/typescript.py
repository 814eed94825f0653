"""Tools as TypeScript declarations, which Kimi K2.5 and later were trained on: their templates read `tools_ts_str`.

The form is that of the encoder published beside their tokenizer, to the byte: required properties first, descriptions,
bounds and defaults as comments before what they are of, "$defs" as interfaces.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kdtp.text.files import TextError

VARIABLE = "tools_ts_str"
_STEP = "  "
_BOUNDS = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_UNION = {"string": "string", "number": "number", "boolean": "boolean", "null": "null"} | {
    "integer": "number",
    "object": "{}",
    "array": "Array<any>",
}
_PYTHON: dict[str, type | tuple[type, ...]] = {"string": str, "number": (int, float), "integer": int, "boolean": bool}

Schema = Mapping[str, Any]


def in_order(value: Any) -> Any:
    """JSON with the keys of every object sorted, as the published code does before it does anything with tools."""
    if isinstance(value, Mapping):
        return {key: in_order(value[key]) for key in sorted(value)}
    return [in_order(item) for item in value] if isinstance(value, list | tuple) else value


def declare(tools: Sequence[Schema]) -> str:
    """The declarations of tools as of the OpenAI API, `in_order`; those that are no functions are left out.

    TextError naming the tool for a JSON schema that has no such form ("oneOf", a reference to elsewhere).
    """
    functions = [tool["function"] for tool in tools if tool.get("type") == "function" and tool.get("function")]
    if not functions:
        return ""
    return "# Tools\n\n## functions\nnamespace functions {\n" + "\n".join(map(_function, functions)) + "\n}\n"


def _function(function: Schema) -> str:
    name = str(function.get("name", "function"))
    try:
        return "\n".join(filter(None, _Declaration().parts(name, function)))
    except (TextError, RecursionError, TypeError, AttributeError, KeyError) as error:
        raise TextError(f"tool {name!r}: {error or type(error).__name__}") from None


class _Declaration:
    """The declaration of one function, whose schema may refer to itself ("#") and to its "$defs"."""

    def __init__(self) -> None:
        self._definitions: dict[str, Any] = {}
        self._is_recursive = False

    def parts(self, name: str, function: Schema) -> Iterator[str]:
        """Interfaces, description and type; the first two may be empty."""
        parameters = function.get("parameters") or {}
        self._meet_object(parameters)
        argument = self._object(parameters, "")
        interfaces = []
        if self._is_recursive:
            argument = "parameters"
            fields = [self._field(parameters, key, _STEP) for key in parameters.get("properties", {})]
            body = "\n" + ",\n".join(fields) + "\n" if fields else ""
            interfaces.append(f"interface parameters {{{body}}}")
        for key, schema in list(self._definitions.items()):
            self._meet(schema)
            comment = _comment(schema.get("description"), "")
            interfaces.append(f"{comment}interface {key} {self._type(schema, '')}")
        yield "\n".join(interfaces)
        yield _comment(function.get("description"), "").removesuffix("\n")
        yield f"type {name} = (_: {argument}) => any;"

    # ------------------------------------------------------------------ first look: definitions and references

    def _meet(self, schema: Any) -> None:
        """Note the definitions of a schema and of those in it; TextError for a reference that was not met before."""
        if not isinstance(schema, Mapping):
            return
        if "$ref" in schema:
            self._refer(schema["$ref"])
        elif "anyOf" in schema:
            for each in schema["anyOf"]:
                self._meet(each)
        elif "enum" not in schema and schema.get("type") == "object":
            self._meet_object(schema)
        elif "enum" not in schema and schema.get("type") == "array":
            self._meet(schema.get("items"))

    def _meet_object(self, schema: Schema) -> None:
        self._definitions.update(schema.get("$defs") or {})
        self._meet(schema.get("additionalProperties"))
        for each in schema.get("properties", {}).values():
            self._meet(each)

    def _refer(self, target: str) -> None:
        name = target.removeprefix("#/$defs/")
        if target == "#":
            self._is_recursive = True
        elif name == target or not isinstance(self._definitions.get(name.split("/")[-1]), Mapping):
            raise TextError(f"$ref = {reprlib.repr(target)}: must be '#' or one of its own '#/$defs/…'")

    # ------------------------------------------------------------------ second look: the text

    def _type(self, schema: Any, indent: str) -> str:
        """A schema as a type."""
        if isinstance(schema, bool) or schema == {}:
            return "null" if schema is False else "any"
        if "$ref" in schema:
            return "parameters" if schema["$ref"] == "#" else str(schema["$ref"].split("/")[-1])
        if "anyOf" in schema:
            return " | ".join(self._type(each, indent) for each in schema["anyOf"])
        if "enum" in schema:
            return " | ".join(f'"{v}"' if isinstance(v, str) else str(v) for v in _checked_enum(schema))
        kind = schema.get("type")
        if isinstance(kind, list):
            return " | ".join(_UNION[each] for each in kind)
        if kind == "object":
            return self._object(schema, indent)
        if kind == "array":
            return self._array(schema, indent)
        if not isinstance(kind, str):
            raise TextError(f"{reprlib.repr(dict(schema))}: must have a type, an enum, anyOf or $ref")
        return "number" if kind == "integer" else kind

    def _object(self, schema: Schema, indent: str) -> str:
        needed = schema.get("required", [])
        names = sorted(schema.get("properties", {}), key=lambda name: (name not in needed, name))
        lines = [self._field(schema, name, indent + _STEP) for name in names]
        others = schema.get("additionalProperties")
        if others is not None:
            kind = "never" if others is False else self._type(others, indent + _STEP)
            lines.append(f"{indent}{_STEP}[k: string]: {kind}")
        return "{\n" + ",\n".join(lines) + f"\n{indent}}}" if lines else "{}"

    def _field(self, owner: Schema, name: str, indent: str) -> str:
        schema = owner["properties"][name]
        comments = _comments(schema, indent)
        default = schema.get("default") if isinstance(schema, Mapping) else None
        if default is not None:
            text = repr(default) if isinstance(default, int | float) else json.dumps(default, ensure_ascii=False)
            comments += f"{indent}// Default: {text}\n"
        mark = "" if name in owner.get("required", []) else "?"
        return f"{comments}{indent}{name}{mark}: {self._type(schema, indent)}"

    def _array(self, schema: Schema, indent: str) -> str:
        items = schema.get("items") or {}
        comments = _comments(items, indent + _STEP)
        if not comments:
            return f"Array<{self._type(items, indent)}>"
        return f"Array<\n{comments}{indent}{_STEP}{self._type(items, indent + _STEP)}\n{indent}>"


def _checked_enum(schema: Schema) -> Sequence[Any]:
    """The values of an enum, which must be of its type if it has one."""
    kind = schema.get("type")
    if isinstance(kind, list):
        named = [each for each in kind if each != "null"]
        if not 1 <= len(kind) <= 2 or (len(kind) == 2 and len(named) == 2):
            raise TextError(f"enum of type {kind}: must be one type, or one and null")
        kind = named[0] if named else "null"
    for value in schema["enum"]:
        if value is not None and kind in _PYTHON and not isinstance(value, _PYTHON[kind]):
            raise TextError(f"enum value {reprlib.repr(value)}: must be of type {kind}")
    values: Sequence[Any] = schema["enum"]
    return values


def _comments(schema: Any, indent: str) -> str:
    """Description and bounds of a schema, a line each, the last with its line end."""
    if not isinstance(schema, Mapping):
        return ""
    text = _comment(schema.get("description"), indent)
    kind = None if {"$ref", "anyOf", "enum"} & {*schema} else schema.get("type")
    bounds = (
        [f"{key}: {schema[key]}" for key in _BOUNDS.get(kind, ()) if key in schema] if isinstance(kind, str) else []
    )
    return text + (f"{indent}// {', '.join(bounds)}\n" if bounds else "")


def _comment(description: str | None, indent: str) -> str:
    lines = description.split("\n") if description else []
    return "".join(f"{indent}// {line}\n" if line else "\n" for line in lines)
