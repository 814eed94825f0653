"""Reasoning and tool calls, told apart however the answer is split."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.text import calls, template
from kdtp.text.calls import (
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI,
    AnswerParser,
    Arguments,
    CallBegin,
    CallEnd,
    Content,
    Delta,
    Format,
    Reasoning,
)
from kdtp.text.stream import TextStream
from kdtp.text.tokenizer import Part, Tokenizer, load
from tests import text_folders as folders

PROPERTY = settings(deadline=None, derandomize=True, max_examples=150)

FORMATS = {"kimi": KIMI, "v3": DEEPSEEK_V3, "v31": DEEPSEEK_V31}


@pytest.fixture(scope="module", params=FORMATS)
def pair(request, tmp_path_factory) -> tuple[Tokenizer, Format]:
    layout = folders.kimi if request.param == "kimi" else folders.deepseek
    return load(layout(tmp_path_factory.mktemp(request.param))), FORMATS[request.param]


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory) -> Tokenizer:
    return load(folders.deepseek(tmp_path_factory.mktemp("deepseek")))


def parser(tokenizer: Tokenizer, form: Format | None, thinking: bool = False) -> AnswerParser:
    number = itertools.count()
    return AnswerParser(tokenizer, form, thinking, lambda: f"call_{next(number)}")


def merged(deltas: list[Delta]) -> list[Delta]:
    """Texts of one kind side by side put together."""
    out: list[Delta] = []
    for delta in deltas:
        if out and isinstance(delta, Content | Reasoning | Arguments) and type(out[-1]) is type(delta):
            last = out.pop()
            delta = (
                Arguments(delta.index, last.text + delta.text)
                if isinstance(delta, Arguments)
                else type(delta)(last.text + delta.text)
            )
        out.append(delta)
    return out


def parsed(tokenizer: Tokenizer, form: Format | None, groups: list[list[int]], thinking: bool = False) -> list[Delta]:
    """Everything, as a server has it: ids in groups through stream and parser."""
    answer = parser(tokenizer, form, thinking)
    stream = TextStream(tokenizer, (), (), answer.marks)
    deltas = [delta for group in groups for delta in answer.push(stream.pieces(group))]
    deltas += answer.push([stream.finish()]) + answer.finish()
    assert all(d.text for d in deltas if isinstance(d, Content | Reasoning | Arguments)), deltas
    return merged(deltas)


def written(form: Format, tokenizer: Tokenizer, content: str, made: list[tuple[str, str, str]]) -> list[Part]:
    """An answer as a model of the family writes it: content, and calls of (id, name, arguments)."""
    control = tokenizer.controls
    parts: list[Part] = [content]
    if made:
        parts.append(control[form.section_begin])
        for call_id, name, arguments in made:
            fence = f"{name}\n```json\n{arguments}\n```"
            head, body = (
                (call_id, arguments) if form.has_ids else ("function", fence) if form.fenced else (name, arguments)
            )
            parts += [control[form.call_begin], head, control[form.separator], body, control[form.call_end]]
        parts.append(control[form.section_end])
    return [part for part in parts if part != ""]


LOOKS = (
    "<|tool_call_end|>",
    "<｜tool▁call▁end｜>",
    "</think>",
    "```",
    "`",
    "\n",
    " ",
    "functions.x:0",
    "{",
    "é",
    "😀",
    "a b",
)
words = st.lists(st.sampled_from(LOOKS), max_size=6).map("".join)
names = st.text(alphabet="abc_.-", min_size=1, max_size=8)
arguments = st.dictionaries(st.sampled_from(["a", "b"]), words, max_size=2).map(
    lambda v: json.dumps(v, ensure_ascii=False)
)
sizes = st.lists(st.integers(1, 5), min_size=1, max_size=8)


def grouped(ids: list[int], sizes: list[int]) -> list[list[int]]:
    groups, at = [], 0
    for size in itertools.cycle(sizes):
        if at >= len(ids):
            return groups
        groups.append(ids[at : at + size])
        at += size
    raise AssertionError


@PROPERTY
@given(
    thought=words,
    content=words,
    wanted=st.lists(st.tuples(names, arguments), max_size=3),
    sizes=sizes,
    inside=st.booleans(),
)
def test_what_a_model_says(pair, thought, content, wanted, sizes, inside):
    """Every part comes out as it went in: also texts that look like control tokens, for any grouping of the tokens."""
    tokenizer, form = pair
    made = [(f"functions.{name}:{i}", name, args) for i, (name, args) in enumerate(wanted)]
    think = [tokenizer.controls[name] for name in calls.THINK]
    parts = [*([] if inside else think[:1]), thought, think[1], *written(form, tokenizer, content, made)]
    deltas = parsed(tokenizer, form, grouped(tokenizer.encode_parts(parts), sizes), inside)
    want: list[Delta] = [Reasoning(thought)] if thought else []
    want += [Content(content)] if content else []
    for i, (call_id, name, args) in enumerate(made):
        want += [CallBegin(i, call_id if form.has_ids else f"call_{i}", name), Arguments(i, args), CallEnd(i)]
    assert deltas == want


@PROPERTY
@given(data=st.data(), sizes=sizes, thinking=st.booleans())
def test_any_tokens_in_any_groups(pair, data, sizes, thinking):
    """Nonsense too is told apart in one way only, and no text is lost but spaces, fences and heads."""
    tokenizer, form = pair
    marks = sorted(parser(tokenizer, form).marks)
    soup = st.lists(st.sampled_from(marks) | words, max_size=14)
    ids = tokenizer.encode_parts(data.draw(soup))
    one = parsed(tokenizer, form, [[token] for token in ids], thinking)
    assert parsed(tokenizer, form, grouped(ids, sizes), thinking) == one == parsed(tokenizer, form, [ids], thinking)
    begun = [d.index for d in one if isinstance(d, CallBegin)]
    ended = [d.index for d in one if isinstance(d, CallEnd)]
    assert begun == list(range(len(begun))) and set(ended) <= set(begun) and len(ended) == len(set(ended))
    open_one = None
    for delta in one:
        if isinstance(delta, CallBegin):
            assert delta.name.strip() and delta.id
            open_one = delta.index
        elif isinstance(delta, Arguments | CallEnd):
            assert delta.index == open_one


@PROPERTY
@given(pieces=st.lists(st.text(alphabet="`\n a{", max_size=12)), cuts=st.lists(st.integers(0, 40), max_size=8))
def test_texts_split_anywhere(deepseek, pieces, cuts):
    """The fenced form looks at single characters: its texts are split at any."""
    control, form = deepseek.controls, DEEPSEEK_V3
    body = "".join(pieces)
    frame = [control[form.call_begin], "function", control[form.separator]]
    places = sorted({0, len(body), *(c for c in cuts if c < len(body))})
    split = [body[a:b] for a, b in itertools.pairwise(places)]
    results = []
    for texts in ([body], split, list(body)):
        answer = parser(deepseek, form)
        deltas = answer.push([*frame, *(t for t in texts if t), control[form.call_end]]) + answer.finish()
        results.append(merged(deltas))
    assert results[0] == results[1] == results[2]


def kimi(tmp_path) -> Tokenizer:
    return load(folders.kimi(tmp_path))


def told(tokenizer: Tokenizer, text: str, form: Format | None = KIMI, thinking: bool = False) -> list[Delta]:
    """What a text with names of control tokens tells."""
    return parsed(tokenizer, form, [tokenizer.encode_parts(tokenizer.split(text))], thinking)


BEGIN, SEP, END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
SECTION, DONE = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        ("hello", [Content("hello")]),
        ("<think>a</think>b", [Reasoning("a"), Content("b")]),
        ("a</think>b", [Content("ab")]),
        ("<think>never ends", [Reasoning("never ends")]),
        # Thinking that is not closed ends where calls begin.
        (f"<think>a{SECTION}{BEGIN}functions.f:0{SEP}{{}}{END}{DONE}",
         [Reasoning("a"), CallBegin(0, "functions.f:0", "f"), Arguments(0, "{}"), CallEnd(0)]),
        (f"{SECTION} \n {BEGIN} functions.a.b:12 {SEP}{{}}{END}\n{DONE}x",
         [CallBegin(0, "functions.a.b:12", "a.b"), Arguments(0, "{}"), CallEnd(0), Content("x")]),
        # Without a section, without an end, with other ids.
        (f"a{BEGIN}f:0{SEP}1{END}", [Content("a"), CallBegin(0, "f:0", "f"), Arguments(0, "1"), CallEnd(0)]),
        (f"{BEGIN}f{SEP}1{BEGIN}g{SEP}2{DONE}",
         [CallBegin(0, "f", "f"), Arguments(0, "1"), CallEnd(0),
          CallBegin(1, "g", "g"), Arguments(1, "2"), CallEnd(1)]),
        (f"{SECTION}{BEGIN}functions.f:0{SEP}" + '{"a"', [CallBegin(0, "functions.f:0", "f"), Arguments(0, '{"a"')]),
        (f"{SECTION}{BEGIN}functions.f", [Content("functions.f")]),
        (f"{SECTION}{BEGIN}f:0{END}{DONE}", [Content("f:0")]),
        (f"{BEGIN} {SEP}{{}}{END}", [Content("{}")]),
        (f"{SECTION} lost? {DONE}", [Content(" lost?")]),
        (f"{SEP}a{END}b{DONE}{SECTION}", [Content("ab")]),
        (f"{SECTION}{DONE} x ", [Content(" x ")]),
        (f"{BEGIN}functions.a:b{SEP}1{END}", [CallBegin(0, "functions.a:b", "a:b"), Arguments(0, "1"), CallEnd(0)]),
        (f"{BEGIN}f:0{SEP}<think>{SEP}{END}", [CallBegin(0, "f:0", "f"), Arguments(0, f"<think>{SEP}"), CallEnd(0)]),
    ],
)  # fmt: skip
def test_kimi(tmp_path, text, deltas):
    assert told(kimi(tmp_path), text) == deltas


def test_without_a_format(tmp_path):
    assert told(kimi(tmp_path), f"<think>a</think>{BEGIN}b", None) == [Reasoning("a"), Content("b")]


V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


@pytest.mark.parametrize(
    ("body", "name", "arguments_"),
    [
        ('f\n```json\n{"a": 1}\n```', "f", '{"a": 1}'),
        ("f\n\n```json\n{}\n```\n", "f", "{}"),
        ("f\n```\n{}```", "f", "{}"),
        ("f\n{}", "f", "{}"),
        ('f\n```json\n{"a": "```"}\n```', "f", '{"a": "```"}'),
        ("f\n```json\n{}", "f", "{}"),
    ],
)
def test_deepseek_v3(tmp_path, body, name, arguments_):
    tokenizer = load(folders.deepseek(tmp_path))
    want = [CallBegin(0, "call_0", name), Arguments(0, arguments_), CallEnd(0)]
    assert told(tokenizer, V3.format(body), DEEPSEEK_V3) == want


def test_a_fenced_call_without_arguments_is_content(deepseek):
    assert told(deepseek, V3.format("f"), DEEPSEEK_V3) == [Content("f")]
    assert told(deepseek, V3.format("f\n"), DEEPSEEK_V3) == [CallBegin(0, "call_0", "f"), CallEnd(0)]


def test_arguments_come_as_they_are_written(tmp_path):
    tokenizer = kimi(tmp_path)
    answer = parser(tokenizer, KIMI)
    control = tokenizer.controls
    assert answer.push([control[BEGIN], "functions.f:0", control[SEP]]) == [CallBegin(0, "functions.f:0", "f")]
    assert answer.push(['{"a']) == [Arguments(0, '{"a')] and answer.push(['": 1}']) == [Arguments(0, '": 1}')]
    assert answer.push([control[END]]) == [CallEnd(0)] and answer.calls == 1


def test_what_the_templates_write_is_read_back(tmp_path):
    call = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
    turn = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    asked = [{"role": "user", "content": "?"}]
    for layout, form in ((folders.kimi, KIMI), (folders.deepseek, DEEPSEEK_V31)):
        tokenizer = load(layout(tmp_path / layout.__name__))
        chat = template.load(tokenizer)
        assert chat is not None and calls.find_format(tokenizer, chat.source) == form
        before = chat.render(asked, add_generation_prompt=True)
        after = chat.render([*asked, turn], add_generation_prompt=False)
        assert after[: len(before)] == before
        answer = [i for i in tokenizer.encode_parts(after[len(before) :]) if i not in tokenizer.stop_ids]
        begin = CallBegin(0, "functions.look:0" if form.has_ids else "call_0", "look")
        assert parsed(tokenizer, form, [answer]) == [
            Content("Let me see."),
            begin,
            Arguments(0, '{"at": "x"}'),
            CallEnd(0),
        ]


def test_formats(tmp_path):
    assert calls.find_format(kimi(tmp_path / "k"), "") == KIMI
    deepseek = load(folders.deepseek(tmp_path / "d"))
    assert (
        calls.find_format(deepseek, "…\n```json\n…") == DEEPSEEK_V3 and calls.find_format(deepseek, "") == DEEPSEEK_V31
    )


def test_where_an_answer_starts(tmp_path):
    tokenizer = kimi(tmp_path)
    for prompt, thinking in (
        ("a<think>", True),
        ("<think>\n ", True),
        ("<think></think>", False),
        ("<think>a", False),
        ("", False),
    ):
        assert calls.is_thinking(tokenizer, tokenizer.encode_parts(tokenizer.split(prompt))) == thinking


def test_marks_and_stops(tmp_path):
    """A mark lets go what a stop string holds back, and ends half a character."""
    tokenizer = kimi(tmp_path)
    think = tokenizer.controls["<think>"]
    stream = TextStream(tokenizer, [tokenizer.controls["<|im_end|>"]], ["abcd"], [think])
    assert stream.pieces([*b"xab", think, *b"cd", 0xC3, think]) == ["x", "ab", think, "c", "d", "\ufffd", think]
    assert stream.pieces([*b"ab", 258, *b"x"]) == ["ab"] and stream.stopped and stream.used == 11
