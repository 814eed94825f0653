"""Grammars: what they forbid is never chosen nor drafted, and the text is the same with any draft."""

from __future__ import annotations

import json
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.config import DrafterConfig, EngineConfig
from kdtp.engine.api import Engine
from kdtp.engine.request import Request
from kdtp.grammar import Grammars
from kdtp.messages import Failed
from kdtp.spec.grammar import allows, constrain
from kdtp.text.tokenizer import load
from kdtp.types import ROOT, Grammar, SamplingParams, Tree
from tests import text_folders
from tests.harness import NONE, Harness
from tests.processes import TINY

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["alpha", "beta", "größe"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "sizes"],
    "additionalProperties": False,
}
JSON = Grammar("json_schema", json.dumps(SCHEMA))
CODE = Grammar("regex", r"[A-Z]{2,4}-[0-9]{3}(x|yy)?")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return text_folders.deepseek(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load(folder, 512)


@pytest.fixture(scope="module")
def engine(folder, tokenizer):
    harness = Harness(TINY)
    harness.compile = Grammars(str(folder), 512, ()).compile
    yield harness
    harness.close()


def rules(grammar):
    return [
        SamplingParams(max_tokens=360, grammar=grammar),
        SamplingParams(max_tokens=360, grammar=grammar, temperature=1.5, seed=3, logprobs=1),
        SamplingParams(max_tokens=360, grammar=grammar, temperature=0.9, seed=8, top_p=0.9, frequency_penalty=0.6),
    ]


@pytest.mark.parametrize("grammar", [JSON, CODE], ids=["json", "regex"])
def test_the_text_matches_and_is_the_same_with_any_draft(engine, tokenizer, grammar):
    rng = random.Random(1)
    prompts = [tuple(rng.randrange(512) for _ in range(n)) for n in (3, 20, 66)]
    params = rules(grammar)
    alone = [engine.run([prompt], p)[0] for prompt, p in zip(prompts, params, strict=True)]
    for done in alone:
        assert done.reason == "stop" and done.tokens[-1] in tokenizer.stop_ids
        check_text(grammar, tokenizer.decode(done.tokens[:-1]))
    known = {prompt: tuple(done.tokens) for prompt, done in zip(prompts, alone, strict=True)}
    accepted = 0
    for drafter in (
        DrafterConfig("oracle", block=8, budget=16),
        DrafterConfig("oracle", block=6, budget=20, hit=(0.7,), rank=3),
        DrafterConfig("oracle", shape="chain", budget=7, hit=(0.9,)),
        DrafterConfig("ngram", budget=12),
    ):
        together = engine.run(prompts, params, drafter, known, kv_tokens=448, prefill_chunk=32)
        for got, want in zip(together, alone, strict=True):
            assert (got.tokens, got.reason, got.logprobs) == (want.tokens, want.reason, want.logprobs)
            accepted += sum(got.usage.accepted_by_depth)
    assert accepted > 20
    half = [len(done.tokens) // 2 for done in alone]
    given = [done.tokens[:n] for n, done in zip(half, alone, strict=True)]
    for got, want in zip(engine.run(prompts, params, given=given), alone, strict=True):
        assert (got.tokens, got.reason) == (want.tokens, want.reason)


def check_text(grammar, text):
    if grammar is CODE:
        assert re.fullmatch(CODE.text, text)
        return
    value = json.loads(text)
    assert list(value) == ["name", "kind", "sizes"] and value["kind"] in SCHEMA["properties"]["kind"]["enum"]
    assert len(value["name"]) <= 6 and len(value["sizes"]) <= 3
    assert all(type(size) is int and 0 <= size <= 99 for size in value["sizes"])


def test_one_request_s_grammar_is_nothing_to_its_neighbours(engine):
    free = SamplingParams(max_tokens=20)
    (alone,) = engine.run([(5, 6, 7)], free)
    together = engine.run([(1, 2), (5, 6, 7)], [rules(JSON)[1], free], DrafterConfig("ngram"))
    assert together[1].tokens == alone.tokens and together[1].logits.tobytes() == alone.logits.tobytes()


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar("json_schema", '{"type": "nonsense"}'), "json_schema: .*nonsense"),
        (Grammar("json_schema", '{"type": '), "grammar: "),
        (Grammar("regex", "[0-9"), "unclosed character class"),
        (Grammar("lark", "start: x"), 'unknown name: "x"'),
    ],
)
def test_a_grammar_that_cannot_be_is_refused(engine, grammar, words):
    coordinator = engine.coordinator()
    with pytest.raises(ValueError, match=words):
        coordinator.submit(Request(1, (1,), SamplingParams(grammar=grammar)))
    assert coordinator.idle


def test_what_a_grammar_needs_is_said(folder, tmp_path):
    with pytest.raises(ValueError, match="ignore_eos = True: must be off with a grammar"):
        SamplingParams(grammar=CODE, ignore_eos=True)
    endless = text_folders.deepseek(tmp_path, eos_token=None)
    with pytest.raises(ValueError, match=r"neither the model nor .* names a token that ends a text"):
        Grammars(str(endless), 512, ()).compile(CODE)
    with pytest.raises(ValueError, match=r"grammar: .*512 tokens, the model only 100"):
        Grammars(str(folder), 100, (1,)).compile(CODE)
    config = EngineConfig(str(TINY), threads=1)
    with Engine.of(config) as made, pytest.raises(ValueError, match=r"grammar: .*no tokenizer"):
        made.generate([(1, 2)], SamplingParams(grammar=CODE))


def test_the_tokenizer_may_lie_elsewhere_than_the_model(folder, tokenizer, monkeypatch):
    monkeypatch.chdir(folder.parent)
    with Engine.of(EngineConfig(str(TINY), threads=1, tokenizer=folder.name)) as made:
        (done,) = made.generate([(1, 2)], SamplingParams(max_tokens=20, grammar=CODE))
    assert re.fullmatch(CODE.text, tokenizer.decode(done.tokens))


def test_the_tokenizer_is_read_once_and_may_be_read_ahead(folder, tmp_path, monkeypatch):
    grammars = Grammars(str(folder), 512, ())
    grammars.prepare()
    monkeypatch.setattr("kdtp.text.tokenizer.load", None)  # calling it would fail
    assert grammars.compile(CODE).mask() == grammars.compile(CODE).mask() != b""
    monkeypatch.undo()
    missing = Grammars(str(tmp_path), 512, (1,))
    missing.prepare()
    with pytest.raises(ValueError, match="no tokenizer"):
        missing.compile(CODE)


def test_a_grammar_is_compiled_once_however_many_want_it(folder, monkeypatch):
    grammars = Grammars(str(folder), 512, ())
    first = grammars.compile(CODE)
    at_first = first.mask()
    for _ in range(2):
        first.advance(next(i for i in range(512) if allows(at_first, i)))
    compiled = []
    compile_ = grammars._compile
    monkeypatch.setattr(grammars, "_compile", lambda grammar: compiled.append(grammar) or compile_(grammar))
    assert grammars.compile(CODE).mask() == at_first != first.mask() and not compiled
    others = [Grammar("regex", f"a{{{i}}}") for i in range(1, 65)]
    for other in (*others, CODE, others[-1]):
        grammars.compile(other)
    assert compiled == [*others, CODE], "the one that was wanted least of late is forgotten"


class Failing:
    """A grammar that reaches a limit at its fourth mask."""

    ends = frozenset({0})

    def __init__(self):
        self.masks, self.error = 0, ""

    def mask(self):
        self.masks += 1
        self.error = "too complex" if self.masks > 3 else ""
        return b"" if self.error else b"\xff" * 64

    def advance(self, token):
        pass

    def rollback(self, count):
        pass


def test_a_grammar_that_fails_fails_its_own_request(engine):
    coordinator = engine.coordinator(NONE)
    coordinator.compile = lambda grammar: Failing()
    coordinator.submit(Request(1, (1, 2), SamplingParams(max_tokens=9, grammar=CODE)))
    coordinator.submit(Request(2, (3,), SamplingParams(max_tokens=9)))
    ends = {}
    while not coordinator.idle:
        ends |= {event.message.request: event.message for event in coordinator.step()}
    assert isinstance(ends[1], Failed) and ends[1].message == "grammar: cannot be followed: too complex, after 2 tokens"
    assert ends[2].reason == "length"


def test_rules_that_leave_nothing_are_named(engine, tokenizer):
    """At once where it is known at once, else with the request's end."""
    coordinator = engine.coordinator(NONE)
    end, digit = min(tokenizer.stop_ids), tokenizer.encode("7")[0]
    nothing, letters = Grammar("lark", 'start: a\na: a "x"'), Grammar("regex", "A{3}")
    for rules, words in (
        ({"grammar": nothing}, "grammar: cannot be followed: NoExtensionBias"),
        ({"grammar": letters, "allowed_tokens": (digit, end)}, "grammar: leaves no token beside allowed_tokens"),
        ({"grammar": Grammar("regex", "()"), "min_tokens": 2}, "grammar: leaves no token beside min_tokens"),
        (
            {"allowed_tokens": (4, 5), "banned_tokens": (4, 5, 6)},
            "allowed_tokens: leaves no token beside banned_tokens",
        ),
        ({"allowed_tokens": (4,), "min_tokens": 1, "stop_tokens": (4,)}, "allowed_tokens: .* beside min_tokens"),
        ({"banned_tokens": tuple(range(512))}, "banned_tokens: leaves no token$"),
    ):
        with pytest.raises(ValueError, match=f"^{words}"):
            coordinator.submit(Request(1, (1,), SamplingParams(max_tokens=9, **rules)))
        assert coordinator.idle
    many = [i for i in range(512) if tokenizer.token_bytes(i).strip(b"A") == b""]  # and no end
    coordinator.submit(Request(1, (1,), SamplingParams(max_tokens=9, grammar=letters, allowed_tokens=tuple(many))))
    while not coordinator.idle:
        last = coordinator.step()[-1].message
    assert (type(last), last.code) == (Failed, "invalid")
    assert re.fullmatch("grammar: leaves no token beside allowed_tokens, after [1-3] tokens", last.message)


class Words:
    """The grammar of a list of words: what may come next is what comes next in one of them; 0 ends."""

    error = ""
    ends = frozenset({0})

    def __init__(self, words):
        self.words, self.text = words, []

    def mask(self):
        here = len(self.text)
        ids = {word[here] if len(word) > here else 0 for word in self.words if list(word[:here]) == self.text}
        return bytes([sum(1 << i for i in ids)])

    def advance(self, token):
        self.text.append(token)

    def rollback(self, count):
        del self.text[len(self.text) - count :]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.data())
def test_what_is_left_of_a_tree(data):
    words = data.draw(st.lists(st.lists(st.integers(1, 4), max_size=5).map(tuple), min_size=1, max_size=6))
    edges = {(ROOT, 7): None}
    for _ in range(data.draw(st.integers(0, 14))):
        edges.setdefault((data.draw(st.integers(0, len(edges) - 1)), data.draw(st.integers(0, 5))), None)
    tree = Tree(tuple(token for _, token in edges), tuple(parent for parent, _ in edges))
    grammar = Words(words)
    kept, masks = constrain(tree, grammar, {0})
    assert grammar.text == [] and len(masks) == len(kept)

    def paths(t):
        found = [()]
        for token, parent in list(zip(t.tokens, t.parents, strict=True))[1:]:
            found.append((*found[parent], token))
        return found

    legal = {word[:n] for word in words for n in range(len(word) + 1)} | {(*word, 0) for word in words}
    assert paths(kept) == [path for path in paths(tree) if path in legal]
    for path, mask in zip(paths(kept), masks, strict=True):
        if path[-1:] != (0,):
            assert [allows(mask, i) for i in range(16)] == [(*path, i) in legal for i in range(16)]
