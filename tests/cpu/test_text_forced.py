"""Whatever a model writes under these grammars is calls of the tools that are there, with arguments that fit."""

from __future__ import annotations

import json
import random
import re

import pytest

from kdtp.grammar import Grammars
from kdtp.spec.grammar import allows
from kdtp.text import forced
from kdtp.text.calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI,
    AnswerParser,
    Arguments,
    CallBegin,
    CallEnd,
    Content,
    Reasoning,
)
from kdtp.text.files import TextError
from kdtp.text.schemas import endless
from kdtp.text.stream import TextStream
from kdtp.text.tokenizer import load
from kdtp.types import Grammar
from tests import text_folders as folders

FORMATS = {"kimi": KIMI, "v3": DEEPSEEK_V3, "v31": DEEPSEEK_V31}
TOOLS = [
    {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rom", "Köln"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
    {"name": 'odd"name\\', "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
]


@pytest.fixture(scope="module", params=FORMATS)
def model(request, tmp_path_factory):
    """(format, tokenizer, grammars) of a family."""
    layout = folders.kimi if request.param == "kimi" else folders.deepseek
    folder = layout(tmp_path_factory.mktemp(request.param))
    tokenizer = load(folder)
    return FORMATS[request.param], tokenizer, Grammars(str(folder), tokenizer.vocab_size, ())


def walk(tokenizer, grammars, text, seed, hurry):
    """Ids that a model without a mind would write; hurry: an id that it likes."""
    matcher = grammars.compile(Grammar("lark", text))
    chance, ids = random.Random(seed), []
    while len(ids) < 2000:
        mask = matcher.mask()
        legal = [token for token in range(tokenizer.vocab_size) if allows(mask, token)]
        assert legal, matcher.error
        token = hurry if hurry in legal and chance.random() < 0.2 else chance.choice(legal)
        ids.append(token)
        if token in matcher.ends:
            return ids
        matcher.advance(token)
    raise AssertionError("no end")


def parsed(tokenizer, form, thinking, ids):
    parser = AnswerParser(tokenizer, form, thinking)
    stream = TextStream(tokenizer, tokenizer.stop_ids, (), parser.marks)
    return parser.push(stream.pieces(ids)) + parser.finish()


@pytest.mark.parametrize("thinking", [False, True])
def test_calls_and_nothing_else(model, thinking):
    form, tokenizer, grammars = model
    text = forced.calls(tokenizer, form, TOOLS, first=3, most=2, thinking=thinking)
    seen = set()
    for seed in range(12):
        ids = walk(tokenizer, grammars, text, seed, tokenizer.controls.get("</think>"))
        deltas = parsed(tokenizer, form, thinking, ids)
        begun = [d for d in deltas if isinstance(d, CallBegin)]
        assert 1 <= len(begun) == sum(isinstance(d, CallEnd) for d in deltas) <= 2
        for call in begun:
            said = "".join(d.text for d in deltas if isinstance(d, Arguments) and d.index == call.index)
            value = json.loads(said)
            if call.name == "look_up":
                assert value["city"] in ("Rom", "Köln") and value["days"] in range(10) and len(value) == 2
            else:
                assert call.name == TOOLS[1]["name"] and value == {}
            if form is KIMI:
                assert re.fullmatch(r"functions\..+:\d+", call.id) and int(call.id.rpartition(":")[2]) in (3, 4)
            seen.add(call.name)
        left = [d for d in deltas if not isinstance(d, CallBegin | Arguments | CallEnd)]
        assert all(isinstance(d, Reasoning) or not d.text.strip() for d in left), "only thinking, and it before"
    assert len(seen) == 2


def test_calls_that_may_come_behind_any_text(model):
    form, tokenizer, grammars = model
    text = forced.calls(tokenizer, form, TOOLS, first=0, most=2, thinking=False, free=True)
    calls, content, thought = 0, 0, 0
    for seed in range(16):
        ids = walk(tokenizer, grammars, text, seed, tokenizer.controls[form.section_begin if seed % 4 else "<think>"])
        deltas = parsed(tokenizer, form, False, ids)
        begun = [d for d in deltas if isinstance(d, CallBegin)]
        for call in begun:
            said = "".join(d.text for d in deltas if isinstance(d, Arguments) and d.index == call.index)
            assert call.name in ("look_up", TOOLS[1]["name"]) and (json.loads(said) == {}) == (call.name != "look_up")
        calls, content = calls + len(begun), content + any(isinstance(d, Content) for d in deltas)
        thought += any(isinstance(d, Reasoning) for d in deltas)
    assert calls > 4 and content > 4 and thought


SELF = {"$ref": "#"}
PAIR = {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/b~1%63"}]}, "b/c": {"anyOf": [{"$ref": "#/$defs/a"}]}}}


@pytest.mark.parametrize(
    ("schema", "loop"),
    [
        (SELF, "# -> #"),
        ({"$ref": "#/$defs/a", **PAIR}, "#/$defs/b~1%63 -> #/$defs/a -> #/$defs/b~1%63"),
        ({"type": "object", "properties": {"x": SELF}, "required": ["x"]}, "# -> #"),
        ({"type": "array", "minItems": 2, "prefixItems": [{}], "items": SELF}, "# -> #"),
        ({"anyOf": [SELF, {"allOf": [{}, SELF]}]}, "# -> #"),
        # These have values that end.
        ({"type": "object", "properties": {"x": SELF}, "required": ["y", []]}, ""),
        ({"type": "array", "items": SELF, "minItems": 0}, ""),
        ({"type": "array", "minItems": 1, "prefixItems": [{}], "items": SELF}, ""),
        ({"anyOf": [SELF, {"type": "null"}], **PAIR}, ""),
        ({"type": ["array", "null"], "items": SELF, "minItems": 1}, ""),
        ({"$ref": "#/anyOf/1", "anyOf": [{}, {"$ref": "elsewhere#"}, {"$ref": "#/nothing/here"}]}, ""),
    ],
)
def test_schemas_whose_values_never_end(model, schema, loop):
    form, tokenizer, grammars = model
    assert endless(schema) == loop
    if loop:
        with pytest.raises(ValueError, match=f"no value of it ever ends: {re.escape(loop)}"):
            grammars.compile(Grammar("json_schema", json.dumps(schema)))
        with pytest.raises(TextError, match="look: no value of its schema ever ends"):
            forced.calls(tokenizer, form, [{"name": "look", "parameters": schema}], 0, 1, False)


def test_one_call_of_one_tool(model):
    form, tokenizer, grammars = model
    ids = walk(tokenizer, grammars, forced.calls(tokenizer, form, TOOLS[1:], 0, 1, False), 5, None)
    assert [d.name for d in parsed(tokenizer, form, False, ids) if isinstance(d, CallBegin)] == [TOOLS[1]["name"]]


def test_json_after_thinking(model):
    _, tokenizer, grammars = model
    schema = {
        "type": "object",
        "properties": {"a": {"enum": [1, "ß"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    text = forced.after_thinking(tokenizer, schema)
    for seed in range(6):
        ids = walk(tokenizer, grammars, text, seed, tokenizer.controls["</think>"])
        at = ids.index(tokenizer.controls["</think>"])
        assert json.loads(tokenizer.decode(ids[at + 1 : -1])) in ({"a": 1}, {"a": "ß"})
