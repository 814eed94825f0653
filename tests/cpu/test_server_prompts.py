"""From bodies to parameters: what the model's authors want by default, and what effort means to a template."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from kdtp.config import EngineConfig
from kdtp.engine.plan import plan
from kdtp.server import defaults
from kdtp.server.app import Endpoint, Options
from kdtp.server.bodies import ChatBody, CompletionBody, Message
from kdtp.server.decode import decode
from kdtp.server.errors import ApiError
from kdtp.server.prompts import Model
from kdtp.text import template
from kdtp.text.files import TextError
from kdtp.text.tokenizer import load
from tests import text_folders
from tests.paths import TINY

ASKED = [Message("user", "What?")]


@pytest.fixture(scope="module")
def parts():
    return plan(EngineConfig(str(TINY)))


def model(parts, folder, **settings):
    tokenizer = load(folder)
    return Model("m", parts, tokenizer, template.load(tokenizer), defaults.read(folder), **settings)


def test_defaults_of_the_model_hold_where_a_request_does_not_say(parts, tmp_path):
    folder = text_folders.deepseek(tmp_path)
    (params,) = (ask.params for ask in model(parts, folder).asks_completion(CompletionBody(prompt="x")))
    assert (params.temperature, params.top_p) == (1.0, 1.0)
    given = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "do_sample": True,
        "min_p": None,
    }
    (folder / "generation_config.json").write_text(json.dumps(given))
    served = model(parts, folder)
    (params,) = (ask.params for ask in served.asks_completion(CompletionBody(prompt="x")))
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0.6, 0.95, 20, 1.05)
    (params,) = (ask.params for ask in served.asks_chat(ChatBody(messages=ASKED, temperature=0.0, top_k=0)))
    assert (params.temperature, params.top_p, params.top_k) == (0.0, 0.95, 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temperature": 7}, "temperature = 7: must be"),
        ({"top_p": "x"}, "top_p = 'x'"),
        ({"top_k": True}, "top_k = True"),
    ],
)
def test_bad_defaults_are_told_by_file_and_field(tmp_path, given, words):
    (tmp_path / "generation_config.json").write_text(json.dumps(given))
    with pytest.raises(TextError, match=words) as refused:
        defaults.read(tmp_path)
    assert "generation_config.json" in str(refused.value)


def chat(folder, source):
    (folder / "chat_template.jinja").write_text(source)
    return folder


def test_effort_is_what_the_template_makes_of_it(parts, tmp_path):
    thinks = model(parts, text_folders.deepseek(tmp_path / "a"))  # reads `thinking`
    begin = thinks.tokenizer.controls["<think>"]
    body = {"messages": ASKED}
    assert thinks.chat_ids(ChatBody(**body, chat_template_kwargs={"thinking": True}))[-1] == begin
    assert thinks.chat_ids(ChatBody(**body, reasoning_effort="none"))[-1] != begin
    with pytest.raises(ApiError, match="must be 'none'") as refused:
        thinks.chat_ids(ChatBody(**body, reasoning_effort="high"))
    assert refused.value.param == "reasoning_effort"
    source = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    plain = model(parts, chat(text_folders.deepseek(tmp_path / "b"), source))
    with pytest.raises(ApiError, match="no thinking to set"):
        plain.chat_ids(ChatBody(**body, reasoning_effort="none"))
    source += " effort {{ reasoning_effort or 'usual' }}"
    reads = model(parts, chat(text_folders.deepseek(tmp_path / "c"), source))
    texts = [reads.tokenizer.decode(reads.chat_ids(ChatBody(**body, reasoning_effort=e))) for e in (None, "low")]
    assert [text.rpartition(" ")[2] for text in texts] == ["usual", "low"]


def test_a_name_is_read_or_told(parts, tmp_path):
    named = ChatBody(messages=[Message("user", "What?", name="Ada"), Message("assistant", "So.")])
    for i, (name, told) in enumerate((("m['name']", []), ("m['role']", ["messages[].name"]))):
        source = f"{{% for m in messages %}}{{{{ {name} }}}}: {{{{ m['content'] }}}}{{% endfor %}}"
        served = model(parts, chat(text_folders.deepseek(tmp_path / str(i)), source))
        assert served.unread(named, served.chat_ids(named)) == told
        assert served.unread(ChatBody(messages=ASKED), ()) == []


def test_names_that_stand_twice_are_found_wherever_they_are():
    body = {"prompt": 'a "x": {', "echo": True, "z": [{"a": 1}, {"a": [{}, {"b": 2}]}, "a"], "": {"echo": 1}}
    text = json.dumps(body)
    assert decode(text.encode(), CompletionBody)[1] == ["z", "''"]
    for before, after, name in (
        ('"b": 2', '"b": 2, "c": "b", "\\u0062": [2]', "b"),
        ('"echo": true', '"echo": true, "ech\\u006f" : false', "echo"),
        ('{"a": 1}', '{"\\"": 1, "\\\\" : {}, "\\"": 2}', '"'),
    ):
        found = decode(text.replace(before, after).encode(), CompletionBody)[1]
        assert found == ["z", "''", f"{name} (given twice)"]


@pytest.mark.parametrize(
    "body, words",
    [
        (b'{"prompt": "x", "n": 129}', "n = 129: Expected `int` <= 128"),
        (b'{"prompt": "x", "seed": %s}' % (b"9" * 5000), f"seed = {'9' * 40}…: Integer value out of range"),
        (b'{"prompt": [[1, 2], [3, "\\n"]]}', r'prompt[1][1] = "\n": Expected `int`, got `str`'),
        (
            b'{"prompt": "\\\\ud800 \\ud83d\\ude00 \\uD800"}',
            r"body: \uD800 is half of a surrogate pair, no character (byte 33)",
        ),
        (b'{"prompt": "x", "a\\udc00": 1}', r"body: \udc00 is half of a surrogate pair, no character (byte 18)"),
        (b'{"prompt": "x", "y": ' + b"[" * 9999, "body: is nested too deeply"),
        (b'{"prompt": "x", "stop": {}}', "stop: Expected `str | array | null`, got `object`"),
        (b'{"prompt": "x", "logit_bias": {"1": "a"}}', "logit_bias[...]: Expected `float`, got `str`"),
    ],
)
def test_an_error_names_field_and_value(body, words):
    with pytest.raises(ApiError) as caught:
        decode(body, CompletionBody)
    assert caught.value.message == words and caught.value.status == 400


def test_large_bodies_are_read_one_at_a_time(parts, tmp_path, monkeypatch):
    """Each takes a thread for seconds, and much memory: those of others are not kept waiting."""
    served = model(parts, text_folders.deepseek(tmp_path))
    reading, most, order = 0, 0, []

    def text_ids(self, text, begin=True):
        nonlocal reading, most
        if len(text) > 1:
            reading += 1
            most = max(most, reading)
            time.sleep(0.05)
            reading -= 1
        order.append(len(text))
        return (0,)

    monkeypatch.setattr(Model, "text_ids", text_ids)
    app = Endpoint(served, None, Options()).app()

    async def ask(text):
        bodies = iter([{"type": "http.request", "body": json.dumps({"prompt": text}).encode()}])

        async def receive():
            return next(bodies, None) or await asyncio.Event().wait()

        sent = []

        async def send(message):
            sent.append(message)

        head = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "state": {"id": "req-1"}}
        await app({**head, "headers": [(b"content-type", b"application/json")]}, receive, send)
        return sent[0]["status"]

    async def all_at_once():
        return await asyncio.gather(*(ask("x" * (1 << 19)) for _ in range(20)), *(ask("x") for _ in range(20)))

    assert set(asyncio.run(all_at_once())) == {200}
    assert most == 1 and order.index(1) < 10
