"""Tools as TypeScript: the published form, to the byte."""

from __future__ import annotations

import pytest

from kdtp.text import template
from kdtp.text.files import TextError
from kdtp.text.tokenizer import load
from kdtp.text.typescript import declare, in_order
from tests import text_folders as folders


def tool(parameters=None, **function) -> dict:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **function}}


def body(parameters=None, **function) -> str:
    """The declarations of one function, without what is around them."""
    text = declare(in_order([tool(parameters, **function)]))
    head, tail = "# Tools\n\n## functions\nnamespace functions {\n", "\n}\n"
    assert text.startswith(head) and text.endswith(tail)
    return text[len(head) : -len(tail)]


def properties(**schemas) -> dict:
    return {"type": "object", "properties": schemas}


def test_a_whole_tool():
    parameters = {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["C", "F"], "default": "C"},
            "city": {
                "type": "string",
                "description": "Name of the city\nin any language",
                "minLength": 1,
                "maxLength": 80,
            },
            "days": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 7},
        },
        "required": ["city"],
        "additionalProperties": False,
    }
    want = """\
# Tools

## functions
namespace functions {
// Weather of a city.
//  Slow.
type weather = (_: {
  // Name of the city
  // in any language
  // maxLength: 80, minLength: 1
  city: string,
  // maxItems: 7
  days?: Array<
    // minimum: 1
    number
  >,
  // Default: "C"
  unit?: "C" | "F",
  [k: string]: never
}) => any;
type nothing = (_: {}) => any;
}
"""
    weather = tool(parameters, name="weather", description="Weather of a city.\n Slow.")
    assert declare(in_order([weather, tool(name="nothing"), {"type": "other"}])) == want


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "string"}, "x?: string"),
        ({"type": "integer"}, "x?: number"),
        ({"type": "boolean", "default": True}, "// Default: True\n  x?: boolean"),
        ({"type": "number", "default": 0.5, "maximum": 2}, "// maximum: 2\n  // Default: 0.5\n  x?: number"),
        ({"type": "object", "default": {"a": "é"}}, '// Default: {"a": "é"}\n  x?: {}'),
        ({"type": ["string", "null"]}, "x?: string | null"),
        ({"type": ["array", "object"]}, "x?: Array<any> | {}"),
        ({"enum": [1, "a", None]}, 'x?: 1 | "a" | None'),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "description": "d"}, "// d\n  x?: string | null"),
        ({"type": "array"}, "x?: Array<any>"),
        ({"type": "array", "items": {"type": "array", "items": {"type": "null"}}}, "x?: Array<Array<null>>"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "x?: {\n    [k: string]: number\n  }"),
        ({"type": "object", "additionalProperties": True}, "x?: {\n    [k: string]: any\n  }"),
        ({}, "x?: any"),
        (True, "x?: any"),
        (False, "x?: null"),
    ],
)
def test_types(schema, text):
    assert body(properties(x=schema)) == f"type f = (_: {{\n  {text}\n}}) => any;"


def test_references():
    node = {"type": "object", "description": "A node", "properties": {"next": {"$ref": "#/$defs/Node"}}}
    text = body({"$defs": {"Node": node}, "type": "object", "properties": {"root": {"$ref": "#/$defs/Node"}}})
    assert text == "// A node\ninterface Node {\n  next?: Node\n}\ntype f = (_: {\n  root?: Node\n}) => any;"
    text = body(properties(b={"type": "string"}, a={"$ref": "#"}) | {"required": ["b"]}, description="d")
    assert text == "interface parameters {\n  a?: parameters,\n  b: string\n}\n// d\ntype f = (_: parameters) => any;"


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"oneOf": [{"type": "string"}]}, "must have a type, an enum, anyOf or $ref"),
        ({"$ref": "#/$defs/Missing"}, "$ref = '#/$defs/Missing'"),
        ({"$ref": "other.json#/x"}, "$ref = 'other.json#/x'"),
        ({"type": "string", "enum": ["a", 1]}, "enum value 1: must be of type string"),
        ({"type": ["string", "integer"], "enum": ["a"]}, "must be one type, or one and null"),
        ({"type": ["text"]}, "text"),
        ({"type": 5}, "must have a type"),
        ("string", ""),
    ],
)
def test_schemas_without_such_a_form(schema, words):
    with pytest.raises(TextError) as error:
        body(properties(x=schema))
    assert str(error.value).startswith("tool 'f': ") and words in str(error.value)


def test_a_schema_that_is_too_deep(tmp_path):
    schema: dict = {"type": "string"}
    for _ in range(2000):
        schema = {"type": "array", "items": schema}
    with pytest.raises(TextError, match="tool 'f': "):
        declare([tool(properties(x=schema))])
    folder = folders.kimi(tmp_path)
    (folder / "chat_template.jinja").write_text(SOURCE)
    chat = template.load(load(folder))
    assert chat is not None
    with pytest.raises(TextError, match=r"chat_template.jinja: chat template: .*recursion"):
        chat.render([], [tool(properties(x=schema))])


SOURCE = (
    "{% if tools %}{% if tools_ts_str %}{{ tools_ts_str }}{% else %}{{ tools | tojson }}{% endif %}{% endif %}"
    "{{ '<think>' if thinking else '' }}{{ 'kept' if preserve_thinking is not false else 'dropped' }}"
)


def test_what_a_template_gets(tmp_path, caplog):
    folder = folders.kimi(tmp_path)
    (folder / "chat_template.jinja").write_text(SOURCE)
    chat = template.load(load(folder))
    assert chat is not None and chat.variables == {"tools_ts_str", "thinking", "preserve_thinking"}
    asked = [{"role": "user", "content": "x"}]
    think = load(folder).controls["<think>"]
    assert chat.render(asked) == [think, "dropped"]
    assert chat.render(asked, variables={"thinking": False, "preserve_thinking": True}) == ["kept"]
    assert chat.render(asked, [tool()]) == [declare([tool()]), think, "dropped"]
    assert chat.render(asked, [tool()], variables={"tools_ts_str": "own"})[0] == "own"
    # One without such a form is told as the template does without the variable, and the log says so.
    odd = tool(properties(x={"oneOf": []}))
    text = chat.render(asked, [odd])[0]
    assert str(text).startswith('[{"function": {"name": "f", "parameters": {"properties": {"x": {"oneOf": []}}')
    assert "not as TypeScript: tool 'f'" in caplog.text


def test_a_template_of_another_family_gets_tools_as_they_are(tmp_path):
    folder = folders.deepseek(tmp_path, chat_template="{{ tools | tojson }}{{ thinking is defined }}")
    chat = template.load(load(folder))
    assert chat is not None
    assert chat.render([], [{"b": 1, "a": 2}]) == ['[{"b": 1, "a": 2}]False']
