"""The endpoint as OpenAI's own client and others meet it: one server of the tiny model for all tests here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import openai
import psutil
import pytest

from kdtp.config import EngineConfig
from kdtp.engine.plan import plan
from kdtp.text.tokenizer import load
from tests.conftest import ROOT
from tests.paths import TINY
from tests.processes import until
from tests.service import KEY, TEXT, Service

pytestmark = [pytest.mark.xdist_group("server"), pytest.mark.timeout(120)]

GREEDY = {"temperature": 0.0}
ASKED = [{"role": "user", "content": "Where is the truth?"}]
GOLDEN = plan(EngineConfig(str(TINY))).golden
assert GOLDEN is not None
TOKENIZER = load(TEXT)
GOLDEN_TEXT = TOKENIZER.decode(GOLDEN.tokens)
BROKEN_TOOL = {"type": "function", "function": {"name": "x", "parameters": {"properties": {"a": {"type": "nonsense"}}}}}
CITY = {
    "type": "function",
    "function": {
        "name": "city",
        "parameters": {
            "type": "object",
            "properties": {"name": {"enum": ["Rom", "Bonn"]}},
            "required": ["name"],
            "additionalProperties": False,
        },
    },
}
TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


def named(name, **more):
    return {"type": "function", "function": {"name": name} | more}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    flags = ("--drafter", "ngram", "--keep-alive", 1, "--max-queue", 100)
    with Service(tmp_path_factory.mktemp("serve"), *flags, wait=False) as running:
        yield running


@pytest.fixture(scope="module")
def ready(service):
    until(lambda: service.health()[0] == 200, 100, "ready")
    return service


@pytest.fixture(scope="module")
def client(ready):
    with openai.OpenAI(base_url=f"{ready.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


def golden(client, **more):
    """A request whose text is known."""
    extra = {"ignore_eos": True} | more.pop("extra_body", {})
    given = {"prompt": list(GOLDEN.prompt), "max_tokens": 24, "extra_body": extra} | GREEDY | more
    return client.completions.create(model="tiny", **given)


def test_health_tells_of_loading_before_anything_is_served(service):
    status, body = service.health()
    if body["state"] == "loading":  # else it was quick
        assert status == 503 and body["progress"]["done"] <= body["progress"]["total"]
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions")):
            status, answer, headers = service.call(method, path, {"prompt": "x"} if method == "POST" else None)
            assert (status, answer["error"]["code"]) == (503, "loading") and int(headers["retry-after"]) >= 1
        assert figures(service)["kdtp:load_progress_ratio"] <= 1 and service.call("GET", "/v1/status")[0] == 200
    until(lambda: service.health()[0] == 200, 100, "ready")
    status, body = service.health()
    assert body["state"] == "ready" and 0 < body["progress"]["done"] == body["progress"]["total"]


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == "tiny" and model.model_dump()["max_model_len"] == 512
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError, match="must be 'tiny'"):
        client.models.retrieve("gpt")


def test_a_golden_text_whole_and_streamed(client):
    done = golden(client)
    (choice,) = done.choices
    assert choice.text == GOLDEN_TEXT and choice.finish_reason == "length"
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (8, 24)
    chunks = list(golden(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks[:-1]) == GOLDEN_TEXT
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 24
    assert all(c.usage is None for c in chunks[:-1]) and len({c.id for c in chunks}) == 1
    assert all(c.usage is None for c in golden(client, stream=True)), "usage that nobody asked for"


def test_a_chat_whole_streamed_and_with_many_at_once(ready, client):
    given = {"model": "tiny", "messages": ASKED, "max_completion_tokens": 20, "seed": 7, "temperature": 0.8}
    whole = client.chat.completions.create(**given).choices[0].message.content
    stream = list(client.chat.completions.create(**given, stream=True))
    assert stream[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in stream) == whole

    async def many():
        async with openai.AsyncOpenAI(base_url=f"{ready.url}/v1", api_key=KEY, max_retries=0) as many_clients:

            async def one(seed):
                parts = []
                async for chunk in await many_clients.chat.completions.create(
                    **given | {"seed": seed}, stream=True, n=1
                ):
                    parts.append(chunk.choices[0].delta.content or "")
                return "".join(parts)

            return await asyncio.gather(*(one(7 + i % 3) for i in range(9)))

    texts = asyncio.run(many())
    three = client.chat.completions.create(**given, n=3).choices
    assert texts[:3] == texts[3:6] == texts[6:] == [c.message.content for c in three] and texts[0] == whole
    assert [c.index for c in three] == [0, 1, 2] and len(set(texts)) == 3


def test_requests_without_a_seed_differ(client):
    texts = {golden(client, temperature=1.0).choices[0].text for _ in range(3)}
    assert len(texts) == 3


def test_stop_strings_end_before_them(client):
    stop = GOLDEN_TEXT[9:13]
    before = GOLDEN_TEXT[: GOLDEN_TEXT.index(stop)]
    done = golden(client, stop=[stop, "never"])
    assert done.choices[0].text == before and done.choices[0].finish_reason == "stop"
    assert done.usage.completion_tokens < 24
    chunks = list(golden(client, stop=stop, stream=True))
    assert "".join(c.choices[0].text for c in chunks) == before
    last = golden(client, extra_body={"stop_token_ids": [GOLDEN.tokens[5]]})
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].text == TOKENIZER.decode(GOLDEN.tokens[: GOLDEN.tokens.index(GOLDEN.tokens[5])])


def test_logprobs_echo_and_scoring(client):
    done = golden(client, logprobs=2, max_tokens=4)
    table = done.choices[0].logprobs
    assert len(table.tokens) == len(table.token_logprobs) == len(table.text_offset) == 4
    assert all(
        max(best.values()) >= value for best, value in zip(table.top_logprobs, table.token_logprobs, strict=True)
    )
    both = golden(client, logprobs=1, max_tokens=4, echo=True)
    assert both.choices[0].text == TOKENIZER.decode(GOLDEN.prompt) + done.choices[0].text
    values = both.choices[0].logprobs.token_logprobs
    assert len(values) == 12 and values[0] is None and values[8:] == table.token_logprobs
    for stream in (False, True):
        scored = golden(client, logprobs=0, max_tokens=0, echo=True, stream=stream)
        choices = [c.choices[0] for c in scored] if stream else scored.choices
        assert choices[0].logprobs.token_logprobs == values[:8]
        assert "".join(c.text for c in choices) == TOKENIZER.decode(GOLDEN.prompt)
    assert golden(client, max_tokens=0, echo=True).choices[0].text == TOKENIZER.decode(GOLDEN.prompt)
    cold = golden(client, logprobs=2, max_tokens=4, temperature=0.01, extra_body={"allowed_token_ids": [300]})
    assert all(-100 < value < 0 for value in cold.choices[0].logprobs.token_logprobs), "of the model, not of the rules"
    chat = client.chat.completions.create(
        model="tiny", messages=ASKED, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    )
    content = chat.choices[0].logprobs.content
    assert len(content) == 3 and all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in content), "greedy"


def test_sampling_fields_have_an_effect(client):
    token = GOLDEN.tokens[0]
    assert golden(client, max_tokens=1, logit_bias={str(token): -100}).choices[0].text != TOKENIZER.decode([token])
    only = golden(client, max_tokens=5, extra_body={"allowed_token_ids": [300]})
    assert only.choices[0].text == TOKENIZER.decode([300] * 5)
    assert golden(client, extra_body={"repetition_penalty": 5.0}).choices[0].text != GOLDEN_TEXT
    assert golden(client, frequency_penalty=2.0, presence_penalty=2.0).choices[0].text != GOLDEN_TEXT
    assert golden(client, temperature=1.5, extra_body={"top_k": 1}).choices[0].text == GOLDEN_TEXT
    assert golden(client, extra_body={"speculate": False, "priority": 3, "cache_salt": "s"}).choices[0].text == (
        GOLDEN_TEXT
    )


def test_several_prompts(client):
    done = golden(client, prompt=[list(GOLDEN.prompt), [5, 6, 7]], n=2, max_tokens=6)
    assert [c.index for c in done.choices] == [0, 1, 2, 3] and done.usage.prompt_tokens == 11
    assert done.choices[0].text == done.choices[1].text == TOKENIZER.decode(GOLDEN.tokens[:6])
    texts = client.completions.create(model="tiny", prompt=["a text", "another"], max_tokens=2, temperature=0)
    assert len(texts.choices) == 2


def test_tools_are_shown_to_the_model(ready, client):
    plain = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=1)
    tools = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=1, tools=[TOOL])
    none = client.chat.completions.create(model="tiny", messages=ASKED, max_tokens=1, tools=[TOOL], tool_choice="none")
    assert plain.usage.prompt_tokens == none.usage.prompt_tokens < tools.usage.prompt_tokens
    ids = ready.post("/tokenize", messages=ASKED, tools=[TOOL])["tokens"]
    assert len(ids) == tools.usage.prompt_tokens


def called(done, stream: bool) -> tuple[list[tuple[str, str]], str, str]:
    """(name, arguments) of each call, the content, and why it ended."""
    if not stream:
        message = done.choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        return calls, message.content or "", done.choices[0].finish_reason
    calls, content, reason = [], "", ""
    for chunk in done:
        delta, reason = chunk.choices[0].delta, chunk.choices[0].finish_reason or reason
        content += delta.content or ""
        for call in delta.tool_calls or ():
            if call.index == len(calls):
                calls.append((call.function.name, ""))
            calls[call.index] = calls[call.index][0], calls[call.index][1] + call.function.arguments
    return calls, content, reason


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_that_must_be_called_is_called(client, stream):
    nothing = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [named("look", parameters=nothing), CITY]
    given = {"model": "tiny", "messages": ASKED, "tools": tools, "seed": 3, "max_tokens": 400, "stream": stream}
    spaces = {str(TOKENIZER.encode(c)[0]): -100 for c in "\t\n\r "}
    for choice in ("required", {"type": "function", "function": {"name": "city"}}):
        done = client.chat.completions.create(**given, tool_choice=choice, logit_bias=spaces)
        calls, content, reason = called(done, stream)
        assert reason == "tool_calls" and not content.strip() and 1 <= len(calls) <= 16
        assert choice == "required" or [name for name, _ in calls] == ["city"]
        one = client.chat.completions.create(**given, tool_choice=choice, logit_bias=spaces, parallel_tool_calls=False)
        assert len(called(one, stream)[0]) == 1
        for name, text in calls:
            assert json.loads(text) in ([{}] if name == "look" else [{"name": "Rom"}, {"name": "Bonn"}])


@pytest.mark.parametrize("stream", [False, True])
def test_a_strict_tool_is_called_as_it_says_or_not_at_all(client, stream):
    strict = CITY | {"function": CITY["function"] | {"strict": True}}
    given = {"model": "tiny", "messages": ASKED, "tools": [TOOL, strict], "temperature": 0, "stream": stream}
    bias = {str(i): -100 for i in range(512) if not TOKENIZER.token_bytes(i).strip()}
    bias |= {str(TOKENIZER.controls[f"<｜tool▁{what}▁begin｜>"]): 100 for what in ("calls", "call")}
    bias[str(TOKENIZER.encode("c")[0])] = 50  # city, not look
    done = client.chat.completions.create(**given, max_tokens=200, logit_bias=bias)
    *calls, _ = called(done, stream)[0]  # the last may be cut off
    assert len(calls) > 1 and {name for name, _ in calls} == {"city"}
    assert all(json.loads(text)["name"] in ("Rom", "Bonn") for _, text in calls)
    given["parallel_tool_calls"] = False
    done = client.chat.completions.create(**given, max_tokens=400, logit_bias=bias)
    assert called(done, stream) == (calls[:1], "", "tool_calls")
    _, content, reason = called(client.chat.completions.create(**given, max_tokens=5), stream)
    assert content and reason == "length"
    strict["function"]["parameters"] = {"$ref": "#"}
    with pytest.raises(openai.BadRequestError, match="tools: city: no value of its schema ever ends: # -> #"):
        client.chat.completions.create(**given)


def test_a_json_schema_is_kept_after_thinking(client):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY["function"]["parameters"]}}
    liked = {str(TOKENIZER.controls["</think>"]): 100} | {str(TOKENIZER.encode(c)[0]): -100 for c in "\t\n\r "}
    answer = client.chat.completions.create(
        model="tiny",
        messages=ASKED,
        response_format=form,
        max_tokens=60,
        logit_bias=liked,
        extra_body={"chat_template_kwargs": {"thinking": True}},
    ).choices[0]
    assert answer.finish_reason == "stop" and json.loads(answer.message.content)["name"] in ("Rom", "Bonn")


@pytest.mark.parametrize("stream", [False, True])
def test_rules_that_do_not_go_together(client, stream):
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [71]}}}
    given = {"model": "tiny", "messages": ASKED, "response_format": form, "stream": stream}
    seven, three = (TOKENIZER.encode(c)[0] for c in "73")
    with pytest.raises(openai.BadRequestError, match="leaves no token beside allowed_token_ids") as refused:
        client.chat.completions.create(**given, extra_body={"allowed_token_ids": [three]})
    assert refused.value.param == "response_format"
    with pytest.raises(openai.APIError, match="beside allowed_token_ids, after 1 tokens") as late:
        done = client.chat.completions.create(**given, extra_body={"allowed_token_ids": [seven]})
        assert len(list(done)) > 1
    assert late.value.param == "response_format" and late.value.type == "invalid_request_error"


def test_a_json_schema_is_kept(client):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    given = {"model": "tiny", "messages": ASKED, "response_format": form, "temperature": 0}
    spaces = {
        str(TOKENIZER.encode(c)[0]): -100 for c in "\t\n\r "
    }  # the model likes them; the grammar does not need any
    answer = client.chat.completions.create(**given, max_tokens=60, logit_bias=spaces).choices[0]
    assert answer.finish_reason == "stop" and json.loads(answer.message.content) in ({"a": 1}, {"a": 2})
    with pytest.raises(openai.BadRequestError, match="beside tools"):
        client.chat.completions.create(**given, tools=[TOOL])
    for schema, words in (({"type": "nonsense"}, "nonsense"), ({"$ref": "#"}, "ever ends: # -> #")):
        form["json_schema"]["schema"] = schema
        with pytest.raises(openai.BadRequestError, match=words) as refused:
            client.chat.completions.create(**given)
        assert refused.value.param == "response_format"


def test_tokenize_and_back(ready):
    text = "Grüße, 世界 <｜User｜>"
    found = ready.post("/tokenize", prompt=text, add_special_tokens=False)
    assert found["count"] == len(found["tokens"]) and found["tokens"] == TOKENIZER.encode(text)
    assert ready.post("/detokenize", tokens=found["tokens"]) == {"prompt": text}
    assert ready.post("/tokenize", prompt=text)["tokens"] == [*TOKENIZER.begin, *found["tokens"]]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "temperature": 3}, "temperature"),
        ("/v1/completions", {"prompt": "x", "top_p": 0}, "top_p"),
        ("/v1/completions", {"prompt": "x", "n": 0}, "n"),
        ("/v1/completions", {"prompt": "x", "n": 2**63 - 1}, "n"),
        ("/v1/completions", {"prompt": ["x"] * 65, "n": 2}, "n"),
        ("/v1/completions", {"prompt": "x", "n": True}, "n"),
        ("/v1/completions", {"prompt": "x", "n": "3"}, "n"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ("/v1/completions", {"prompt": "x", "seed": 2**63}, "seed"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": []}, "prompt"),
        ("/v1/completions", {"prompt": [1, "x"]}, "prompt"),
        ("/v1/completions", {"prompt": [512]}, "prompt"),
        ("/v1/completions", {"prompt": [1] * 513}, "prompt"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"600": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"5": 101}}, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "logprobs": 21}, "logprobs"),
        ("/v1/completions", {"prompt": "x", "stop": ["x"] * 33}, "stop"),
        ("/v1/completions", {"prompt": "x", "stop": ""}, "stop"),
        ("/v1/completions", {"prompt": "x", "stop_token_ids": [511, 512]}, "stop_token_ids[1]"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"05": 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "logit_bias": {"9" * 21: 1}}, "logit_bias"),
        ("/v1/completions", {"prompt": "x", "best_of": True}, "best_of"),
        ("/v1/completions", {"prompt": "x", "return_token_ids": True}, "return_token_ids"),
        ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options"),
        ("/v1/completions", {"prompt": "x", "best_of": 2}, "best_of"),
        ("/v1/completions", {"prompt": "x", "suffix": "y"}, "suffix"),
        ("/v1/completions", {}, None),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ("/v1/chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ("/v1/chat/completions", {"messages": ASKED, "tools": [{"type": "custom"}]}, "tools[0].type"),
        ("/v1/chat/completions", {"messages": ASKED, "tools": [{"type": "function"}]}, "tools[0].function"),
        (
            "/v1/chat/completions",
            {"messages": ASKED, "tools": [named("f", parameters={"type": "string"})]},
            "tools[0].function.parameters.type",
        ),
        ("/v1/chat/completions", {"messages": ASKED, "tools": [named("f"), named("f")]}, "tools[1].function.name"),
        ("/v1/completions", {"prompt": "x", "allowed_token_ids": []}, "allowed_token_ids"),
        ("/v1/chat/completions", {"messages": ASKED, "max_completion_tokens": 0}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": ASKED, "tool_choice": "required"}, "tool_choice"),
        ("/v1/chat/completions", {"messages": ASKED, "tools": [TOOL], "tool_choice": "any"}, "tool_choice"),
        (
            "/v1/chat/completions",
            {"messages": ASKED, "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "leap"}}},
            "tool_choice",
        ),
        (
            "/v1/chat/completions",
            {"messages": ASKED, "tools": [BROKEN_TOOL], "tool_choice": "required"},
            "tools",
        ),
        ("/v1/completions", {"prompt": "x", "n": 101}, "n"),
        ("/v1/chat/completions", {"messages": ASKED, "max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": ASKED, "response_format": {"type": "text", "json_schema": {"name": "x", "schema": {}}}},
            "response_format.json_schema",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "image_url": {}}]}]},
            "messages[0].content[0].image_url",
        ),
        *(
            ("/v1/chat/completions", {"messages": ASKED, "tools": [named(name)]}, "tools[0].function.name")
            for name in ("", "a b", "x" * 65, "x\n", "<｜tool▁sep｜>", "x\x1b[2J", "é")
        ),
        ("/v1/chat/completions", {"messages": ASKED, "reasoning_effort": "high"}, "reasoning_effort"),
        ("/v1/chat/completions", {"messages": ASKED, "top_logprobs": 2}, "top_logprobs"),
        ("/v1/chat/completions", {"messages": ASKED, "functions": [{}]}, "functions"),
        ("/v1/chat/completions", {"messages": ASKED, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/v1/chat/completions", {"messages": ASKED, "response_format": {"type": "yaml"}}, "response_format.type"),
        ("/detokenize", {"tokens": [512]}, "tokens[0]"),
        ("/tokenize", {}, "prompt"),
    ],
)
def test_what_cannot_be_is_refused_by_name(ready, path, body, param):
    status, answer, headers = ready.call("POST", path, body)
    assert status == 400, answer
    error = answer["error"]
    assert error["type"] == "invalid_request_error" and error["param"] == param and headers["x-request-id"]
    assert set(error) == {"message", "type", "param", "code"}
    if param:
        assert param.split("[")[0].split(".")[0] in error["message"]
    if body.get("n") == 101:
        assert error["message"] == "n = 101: of 1 prompt(s), but at most 100 may wait (--max-queue)"


@pytest.mark.parametrize(
    "body",
    [
        *(b'{"prompt":"x","temperature":%s}' % n for n in (b"NaN", b"Infinity", b"1e999", b"-Infinity", b'"1"')),
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\xff"}',
        b"[" * 100_000,
        b'{"prompt":"x","seed":' + b"9" * 40 + b"}",
        b'{"prompt":"x","max_tokens":1.5}',
        b'{"prompt":[1e40]}',
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"{}{}",
        b'{"prompt":{"a":1}}',
        b'{"prompt":"x","model":7}',
    ],
)
def test_nasty_bodies(ready, body):
    status, answer, _ = ready.call("POST", "/v1/completions", body)
    assert status == 400 and answer["error"]["message"], answer


def test_duplicate_keys_last_wins(ready):
    twice = b'{"prompt":"x","max_tokens":9,"max_tokens":2,"logit_bias":{"5":1,"5":2,"6":1},"big":%s}' % (b"9" * 5000)
    status, answer, headers = ready.call("POST", "/v1/completions", twice)
    assert status == 200 and answer["usage"]["completion_tokens"] <= 2
    assert headers["x-kdtp-ignored-fields"] == "big, max_tokens (given twice), 5 (given twice)"


def test_unknown_fields_are_told(ready):
    status, _, headers = ready.call(
        "POST", "/v1/completions", {"prompt": "x", "max_tokens": 1, "tempratur": 1, "a\nb": 2, "user": "me"}
    )
    assert status == 200 and headers["x-kdtp-ignored-fields"] == "tempratur, 'a\\nb'"
    odd = {"": 1, " ": 1, "x" * 63 + " y": 1, "é": 1}
    status, _, headers = ready.call("POST", "/v1/completions", {"prompt": "x", "max_tokens": 1} | odd)
    assert status == 200 and headers["x-kdtp-ignored-fields"].startswith("'', ' ', 'xxx")
    assert "fields without effect: tempratur, 'a\\nb'" in ready.text()


def test_unknown_fields_of_messages_are_told_unless_empty(ready):
    messages = [*ASKED, {"role": "assistant", "content": "So", "prefix": True, "refusal": None, "annotations": []}]
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "title": "y"}}
    body = {"messages": messages, "max_tokens": 1, "response_format": form}
    status, _, headers = ready.call("POST", "/v1/chat/completions", body)
    told = "messages[].prefix, response_format.json_schema.title"
    assert status == 200 and headers["x-kdtp-ignored-fields"] == told
    messages[0] = ASKED[0] | {"name": "Ada"}  # which the template does not read
    for path in ("/v1/chat/completions", "/tokenize"):
        status, _, headers = ready.call("POST", path, body)
        assert status == 200 and headers["x-kdtp-ignored-fields"].endswith(", messages[].name")


def test_unknown_fields_of_tools_are_told(ready):
    tool = {"type": "function", "cache": 1, "function": {"name": "f", "parameters": {}, "examples": []}}
    body = {"messages": ASKED, "max_tokens": 1, "tools": [tool, TOOL]}
    status, _, headers = ready.call("POST", "/v1/chat/completions", body)
    assert status == 200 and headers["x-kdtp-ignored-fields"] == "tools[].cache, tools[].function.examples"


def test_a_body_that_is_packed_is_refused(ready):
    status, answer, _ = ready.call("POST", "/v1/completions", {"prompt": "x"}, **{"Content-Encoding": "gzip"})
    assert status == 415 and "content-encoding = 'gzip'" in answer["error"]["message"]


def test_the_document_says_what_is_accepted(ready):
    document = ready.call("GET", "/openapi.json")[1]
    schemas = document["components"]["schemas"]
    for path, operations in document["paths"].items():
        for method in operations:
            there = path.replace("{name}", "tiny").replace("{id}", "none").replace("{choice}", "0")
            status = ready.call(method.upper(), there, b"{" if method == "post" else None)[0]
            assert status == (400 if method == "post" else 404 if "{id}" in path else 200), path
    assert set(schemas["CompletionBody"]["required"]) == {"prompt"}
    fields = schemas["ChatBody"]["properties"]
    assert fields["temperature"]["anyOf"][0] == {"type": "number", "minimum": 0, "maximum": 2}
    for name in ("n", "max_completion_tokens", "tools", "response_format", "stream_options", "min_p"):
        assert name in fields
    assert document["security"] == [{"key": []}] and document["paths"]["/health"]["get"]["security"] == []


def test_the_door(ready):
    for key in (None, "", "wrong-key", KEY[:-1], KEY + "x", "ключ".encode().decode("latin-1")):
        for path in ("/v1/models", "/tokenize", "/nowhere"):
            status, answer, _ = ready.call("GET", path, key=key)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key"), (key, path)
    assert ready.call("GET", "/v1/models", key="another-key-of-theirs")[0] == 200
    assert ready.call("GET", "/health", key=None)[0] == 200
    assert ready.call("GET", "/nowhere")[0] == 404 and ready.call("GET", "/v1/completions")[0] == 405
    status, answer, _ = ready.call("POST", "/tokenize", {"prompt": "x"}, **{"Content-Type": "text/plain"})
    assert status == 415 and "application/json" in answer["error"]["message"]


def test_limits_of_heads_and_bodies(ready):
    head = (
        f"POST /tokenize HTTP/1.1\r\nHost: [::1]\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    )
    assert b"431" in ready.raw(head.encode() + b"".join(b"X-%d: y\r\n" % i for i in range(200)) + b"\r\n")
    assert ready.raw(head.encode() + b"X: " + b"y" * (1 << 20) + b"\r\n\r\n").split(b" ")[1:2] in ([b"400"], [])
    chunked = head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + (b"100000\r\n" + b"x" * (1 << 20) + b"\r\n") * 9
    assert ready.raw(chunked).split(b" ")[1:2] in ([b"413"], [])
    assert ready.health()[0] == 200


def test_the_context_to_the_last_position(client):
    for length, legal in ((511, True), (512, True), (513, False)):
        if legal:
            assert golden(client, prompt=[1] * length, max_tokens=4).choices[0].finish_reason == "length"
        else:
            with pytest.raises(openai.BadRequestError, match="513 tokens, but the model's context is 512"):
                golden(client, prompt=[1] * length)


def test_more_tokens_than_the_context_has_room_for(client):
    done = golden(client, max_tokens=10_000)
    assert done.choices[0].finish_reason == "length" and done.usage.total_tokens == 513  # the last needs no row


def test_two_requests_at_once_under_one_name_of_their_client(ready):
    answers = []

    def ask():
        body = {"prompt": list(GOLDEN.prompt), "max_tokens": 24, "ignore_eos": True} | GREEDY
        answers.append(ready.call("POST", "/v1/completions", body, **{"X-Request-Id": "the same"}))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [answer["choices"][0]["text"] for _, answer, _ in answers] == [GOLDEN_TEXT] * 2
    assert len({answer["id"] for _, answer, _ in answers}) == 2
    assert len({headers["x-request-id"] for _, _, headers in answers} | {"the same"}) == 3


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_ends_his_request(ready, stream):
    body = {"prompt": [1, 2, 3], "max_tokens": 490, "ignore_eos": True, "stream": stream, "n": 4, "speculate": False}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    rows = figures(ready)["kdtp:iteration_tokens_total_sum"]
    with socket.create_connection(("127.0.0.1", ready.port), timeout=20) as connection:
        connection.sendall(head.encode() + data)
        if stream:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        else:
            time.sleep(0.3)
        before = len(ready.text())
    until(lambda: "the client has left" in ready.text()[before:], 20, "noticed")
    until(lambda: is_idle(ready), 20, "gone from the engine, and its pages back")
    assert figures(ready)["kdtp:iteration_tokens_total_sum"] - rows < 4 * 480, "not all of it was run"
    assert golden(openai.OpenAI(base_url=f"{ready.url}/v1", api_key=KEY)).choices[0].text == GOLDEN_TEXT


def figures(ready) -> dict[str, float]:
    status, text, headers = ready.call("GET", "/metrics")
    assert status == 200 and headers.get_content_type() == "text/plain"
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    assert len({name for name, _, _ in lines}) == len(lines), "a figure twice"
    return {name: float(value) for name, _, value in lines}


def is_idle(ready) -> bool:
    """One look, as two may be at figures of different age: no request runs, and no page is in use."""
    now = figures(ready)
    return now["kdtp:num_requests_running"] == 0 == now["kdtp:kv_cache_usage_perc"]


def test_metrics_and_open_requests(ready, client):
    before = figures(ready)
    golden(client)
    golden(client, stop=GOLDEN_TEXT[9:13])
    after = figures(ready)

    def more(name):
        return after[f"kdtp:{name}"] - before.get(f"kdtp:{name}", 0)

    assert more("prompt_tokens_total") == 16 and 24 < more("generation_tokens_total") <= 48
    assert more('request_success_total{finished_reason="length"}') == 1
    assert more('request_success_total{finished_reason="stop"}') == 1
    assert more("time_to_first_token_seconds_count") == more("e2e_request_latency_seconds_count") == 2
    assert more('request_prompt_tokens_bucket{le="+Inf"}') == 2 == more('request_prompt_tokens_bucket{le="16"}')
    assert after['kdtp:engine_state{state="ready"}'] == 1 and after["kdtp:load_progress_ratio"] == 1
    assert more("request_queue_time_seconds_count") >= 1 and after['kdtp:worker_up{rank="0"}'] == 1
    assert after["kdtp:desync_failures_total"] == after["kdtp:corrupted_requests_total"] == 0
    for name in (
        "iteration_tokens_total_count",
        "tree_nodes_sum",
        "tree_depth_sum",
        "accepted_path_length_count",
    ):  # the engine's, a second old
        until(lambda: figures(ready)[f"kdtp:{name}"] > before[f"kdtp:{name}"], 5, name)  # noqa: B023
    assert 0 <= figures(ready)['kdtp:worker_last_step_age_seconds{rank="0"}'] < 10  # an idle rank is pinged
    stream = golden(client, prompt=[3, 4], max_tokens=500, stream=True, extra_body={"speculate": False})
    next(iter(stream))
    (open_one,) = ready.call("GET", "/v1/requests")[1]["data"]
    assert open_one["prompt_tokens"] == 2 and open_one["max_tokens"] == 500 and open_one["completion_tokens"] >= 1
    stream.close()
    until(lambda: not ready.call("GET", "/v1/requests")[1]["data"], 20, "gone")
    until(lambda: is_idle(ready), 20, "gone from the engine, and its pages back")
    assert figures(ready)['kdtp:request_success_total{finished_reason="abort"}'] >= 1


def test_a_storm_changes_no_text(ready, client):
    """64 clients at once, a third of whom leave in the middle: each text is what it is alone."""
    kinds = [
        {"prompt": [*range(1, 80), 7], "temperature": 0},
        {"prompt": [*range(1, 80), 9], "temperature": 0, "frequency_penalty": 0.5},
        {"prompt": [5, 6], "temperature": 0.8, "seed": 3},
        {"prompt": "a text", "temperature": 1.1, "seed": 4, "extra_body": {"top_k": 40, "min_p": 0.01}},
        {"prompt": [*range(1, 80), 7], "temperature": 0, "extra_body": {"ignore_eos": True, "speculate": False}},
        {"prompt": [8] * 150, "temperature": 0, "logit_bias": {"8": -5}},
    ]
    given = [{"model": "tiny", "max_tokens": 24} | kind for kind in kinds]
    alone = [client.completions.create(**each).choices[0].text for each in given]

    async def one(clients, i: int) -> str | None:
        text = ""
        async with await clients.completions.create(**given[i % len(given)], stream=True) as stream:
            async for chunk in stream:
                text += chunk.choices[0].text
                if i % 3 == 0 and len(text) > i % 10:
                    return None
        return text

    async def storm():
        async with openai.AsyncOpenAI(base_url=f"{ready.url}/v1", api_key=KEY, max_retries=0) as clients:
            return await asyncio.gather(*(one(clients, i) for i in range(64)))

    for i, text in enumerate(asyncio.run(storm())):
        assert text is None or text == alone[i % len(alone)], i
    until(lambda: is_idle(ready), 20, "idle")
    assert not ready.call("GET", "/v1/requests")[1]["data"]


def test_listeners_are_on_loopback(ready):
    sockets = [c for p in ready.family() for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert {c.laddr.ip for c in sockets} == {"127.0.0.1"}


def test_no_document_and_no_data_makes_it_fail(ready, tmp_path):
    """Schemathesis: bodies that the document forbids, and odd ones that it allows; never a 5xx, always our errors."""
    schemathesis = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    if schemathesis is None:
        pytest.skip("schemathesis is not installed (extra dev)")
    flags = ["--mode", "negative", "--phases", "fuzzing", "--max-examples", 12, "--seed", 1, "--request-timeout", 20]
    flags += ["--exclude-path-regex", "rounds", "--header", f"Authorization: Bearer {KEY}", "--no-color"]
    command = [schemathesis, "run", f"{ready.url}/openapi.json", *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-5000:]
    assert int(re.search(r"(\d+) generated, \1 passed", done.stdout)[1]) > 40, done.stdout[-1000:]


def test_openai_s_client_for_node(ready, tmp_path):
    """A second parser of our streams, by other people."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    install = [npm, "install", "--no-audit", "--no-fund", "--no-save", "--prefix", tmp_path, "openai@7.59.0"]
    try:
        fetched = subprocess.run(list(map(str, install)), capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        pytest.skip("npm does not fetch openai within a minute")
    if fetched.returncode:
        pytest.skip(f"npm cannot fetch openai: {fetched.stderr[-200:]}")
    spaces = {str(TOKENIZER.encode(c)[0]): -100 for c in "\t\n\r "}
    command = [node, ROOT / "tests" / "node_client.mjs", tmp_path, f"{ready.url}/v1", KEY]
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | {"SPACES": json.dumps(spaces)},
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["whole"] == found["streamed"] and len(found["reasons"]) == 1
    assert found["usage"]["completion_tokens"] <= 24 and found["left"] == "text_completion"
    assert found["call"][0] == "city" and found["call"][1]["name"] in ("Rom", "Bonn")
    assert [tuple(e) for e in found["errors"]] == [
        (400, "temperature", "invalid_request_error"),
        (404, "model", "not_found_error"),
        (400, "top_p", "invalid_request_error"),
    ]
