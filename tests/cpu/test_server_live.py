"""What a server shows of itself: figures, the rounds of a request, and the page that draws them."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from kdtp.__main__ import main
from kdtp.server.errors import ApiError
from kdtp.server.journal import Job
from kdtp.server.live import Live
from kdtp.server.watcher import Watcher
from kdtp.types import SamplingParams
from tests import browser
from tests.browser import Browser
from tests.processes import TINY, until
from tests.service import KEY, Service

pytestmark = [pytest.mark.xdist_group("server-live"), pytest.mark.timeout(120)]

LONG = {"prompt": [1, 2, 3] * 5, "max_tokens": 450, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def ready(tmp_path_factory):
    with Service(tmp_path_factory.mktemp("live"), "--drafter", "ngram", "--budget", 24) as running:
        yield running


@pytest.fixture(scope="module")
def asking(ready):
    """Long requests that run meanwhile, one after another."""
    enough = threading.Event()

    def ask():
        while not enough.is_set():
            ready.post("/v1/completions", **LONG, n=2)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: any(entry["completion_tokens"] for entry in opened(ready)), 20, "under way")
    yield
    enough.set()
    thread.join(60)


def run(ready, *flags: object, text: str = "") -> subprocess.CompletedProcess[str]:
    """A command of ours as a client, with the key in the environment."""
    command = [sys.executable, "-m", "kdtp", *map(str, flags), "--url", ready.url]
    surroundings = os.environ | {"KDTP_API_KEY": KEY}
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, env=surroundings)


def test_bench_serve_tells_what_a_load_met(ready, tmp_path):
    flags = ("--requests", 6, "--concurrency", 3, "--prompt-tokens", "70:80", "--max-tokens", 12, "--warmup", 0)
    done = run(ready, "bench", "serve", *flags, "--shared-prefix", 64, "--json", "--png", tmp_path / "x.png")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["failed"] == {} and found["tokens"] == 72 and 420 <= found["prompt_tokens"] <= 480
    assert found["tokens_per_second"] > 0 and found["rounds"] > 0 and found["first_text_ms"]["p50"] > 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "texts.jsonl").write_text('"def f(x):\\n    return"\n"import"\n')
    done = run(ready, "bench", "serve", "--prompts", tmp_path / "texts.jsonl", "--requests", 2, "--warmup", 0, "--json")
    found = json.loads(done.stdout)
    assert found["tokens"] == 128 and found["prompt_tokens"] > 10 and "texts + 64 tokens" in found["load"]
    bad = run(ready, "bench", "serve", "--prompt-tokens", 600, "--requests", 2, "--warmup", 0)
    assert bad.returncode == 1 and "failed: 2 x prompt: 600 tokens" in bad.stdout


def test_bench_serve_reads_its_prompts_before_it_connects(capsys, tmp_path):
    missing = str(tmp_path / "missing")
    assert main(["bench", "serve", "--url", "http://127.0.0.1:1", "--prompts", missing]) == 2
    assert f"--prompts {missing}: " in capsys.readouterr().err


def test_bench_context_tells_what_a_round_costs(capsys, tmp_path):
    flags = ["--model", str(TINY), "--threads", "1", "--drafter", "ngram", "--max-tokens", "8"]
    assert main(["bench", "context", *flags, "--lengths", "16,100", "--json", "--png", str(tmp_path / "c.png")]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["context"] for point in points] == [16, 100]
    for point in points:
        assert point["prefill_tokens_per_second"] > 0 and point["tokens_per_second"] > 0
        assert point["tokens_per_round"] >= 1 and set(point["round_ms"]) >= {"draft", "build", "verify", "accept"}
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    assert main(["bench", "context", *flags, "--lengths", "16,510"]) == 2
    assert "--lengths 510: with 8 tokens behind it" in capsys.readouterr().err


def test_chat_with_an_endpoint(ready):
    done = run(ready, "chat", "--max-tokens", 9, "--system", "Brief.", text="Hello\n/reset\nAgain\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("[9 tokens, ") == 2 and "a new conversation" in done.stderr
    body = {"messages": [{"role": "system", "content": "Brief."}, {"role": "user", "content": "Hello"}]}
    truth = ready.post("/v1/chat/completions", **body, max_tokens=9, temperature=0.0)
    message = truth["choices"][0]["message"]
    assert done.stdout.startswith(message.get("reasoning_content", "") + message["content"])
    refused = run(ready, "chat", "--tp", 2)
    assert refused.returncode == 2 and "--tp: is not for an endpoint" in refused.stderr


def opened(ready) -> list[dict]:
    return ready.call("GET", "/v1/requests")[1]["data"]


def choices(ready, fit) -> list[dict]:
    """Both choices of an open request, once there is one and both `fit`: requests come and go."""
    seen: list[dict] = []

    def look() -> bool:
        seen[:] = opened(ready)
        return len(seen) == 2 and all(map(fit, seen))

    until(look, 20, "a request of that kind")
    return seen


def rounds(ready, entry: dict) -> list[dict]:
    """The events of a request's rounds up to the end."""
    connection = http.client.HTTPConnection("127.0.0.1", ready.port, timeout=30)
    path = f"/v1/requests/{entry['id']}/{entry['choice']}/rounds"
    connection.request("GET", path, headers={"Authorization": f"Bearer {KEY}"})
    response = connection.getresponse()
    assert response.status == 200 and response.headers.get_content_type() == "text/event-stream"
    lines = response.read().decode().split("\n\n")
    connection.close()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


def test_the_rounds_of_a_request_and_what_it_has_cost(ready, asking):
    first = ready.call("GET", "/v1/status")[1]
    _, entry = choices(ready, lambda choice: choice["completion_tokens"] < 100)  # it has not ended when it is watched
    *shown, end = rounds(ready, entry)
    assert end == {"ended": True} and entry["choice"] == 1 and len(shown) > 5
    for event in shown:
        nodes, path = event["nodes"], event["path"]
        assert nodes[0]["parent"] == -1 and path[0] == 0 and 0 < event["position"] < 450
        assert all(nodes[b]["parent"] == a for a, b in itertools.pairwise(path))
        assert all(0 < node["p"] <= 1 and 0 <= node["parent"] < i for i, node in enumerate(nodes) if i)
        assert event["timings_ms"]["verify"] > 0 and event["bonus"]["text"] is not None
    numbers = [event["number"] for event in shown]
    assert numbers == sorted(set(numbers)) and max(len(event["nodes"]) for event in shown) > 1
    last = ready.call("GET", "/v1/status")[1]
    assert last["steps"] > first["steps"] and sum(last["accepted"]) > 0 and last["stage_ms"]["verify"] > 0
    assert last["generation_tokens"] > first["generation_tokens"] and last["model"] == "tiny"
    for choice in (1, -1, "9" * 5000, "x"):
        status, answer, _ = ready.call("GET", f"/v1/requests/{entry['id']}/{choice}/rounds")
        assert (status, answer["error"]["code"]) == (404, "request_not_found")


def test_no_more_watchers_than_there_may_be():
    job = Job((1,), SamplingParams(), print, id="mine")
    driver = SimpleNamespace(jobs=lambda: [job], watching=lambda job: contextlib.nullcontext(Watcher()))
    live = Live(None, driver)
    request = SimpleNamespace(path_params={"id": "mine", "choice": "0"})

    async def leave():
        return {"type": "http.disconnect"}

    async def ignore(message):
        pass

    async def main():
        there = [await live.rounds(request) for _ in range(16)]  # all in one turn, before any of them runs
        with pytest.raises(ApiError, match="16 watchers are there already"):
            await live.rounds(request)
        await there[0]({}, leave, ignore)
        await live.rounds(request)

    asyncio.run(main())


def test_an_open_request_tells_its_acceptance(ready, asking):
    for entry in choices(ready, lambda choice: choice["drafted_by_depth"]):
        assert 1 <= entry["tokens_per_round"] <= 8 and entry["timings_ms"]["verify"] > 0
        assert len(entry["drafted_by_depth"]) == len(entry["accepted_by_depth"]) > 0


def test_the_page_and_its_files_need_no_key_and_the_figures_do(ready):
    for path in ("/", "/page/page.js", "/page/tree.js", "/page/svg.js", "/page/page.css", "/page/icon.svg"):
        status, text, headers = ready.call("GET", path, key=None)
        assert status == 200 and text and "default-src 'none'" in headers["content-security-policy"]
        assert "http:" not in text.replace("http://www.w3.org/", "") and "https:" not in text
    assert ready.call("GET", "/page/../app.py", key=None)[0] == 401
    assert ready.call("GET", "/page/nothing.js")[0] == 404
    for path in ("/v1/status", "/v1/requests", "/v1/requests/x/0/rounds"):
        assert ready.call("GET", path, key=None)[0] == 401
    assert ready.call("POST", "/v1/status")[0] == 405


@pytest.mark.skipif(browser.find() is None, reason=f"no browser: none of {', '.join(browser.NAMES)} is installed")
def test_the_page_draws_the_tree_of_a_request(ready, asking, tmp_path):
    with Browser(browser.find(), tmp_path / "profile") as page:
        page.scheme("light")
        page.open(f"{ready.url}/")
        page.until("document.getElementById('door')?.hidden === false")
        assert page.run("document.querySelector('main').hidden")
        enter = "document.getElementById('key').value = '%s'; document.querySelector('#door button').click()"
        page.run(enter % "wrong-key-of-nobody")
        page.until("document.getElementById('refused').textContent.includes('not one of')")
        page.run(enter % KEY)
        page.until("document.getElementById('state').textContent === 'ready'")
        page.until("document.querySelectorAll('#requests button').length === 2")
        # The list is up to a second old: a request in it may have ended. What shows a tree is looked at and held in
        # one go, for the next tree may be a small one.
        again = "document.querySelector('#requests button')?.click()"
        over = "/ended|no more/.test(document.getElementById('about').textContent)"
        page.run(again)
        count = "document.querySelectorAll('#tree g.{}').length > {}"
        seen = f"{count.format('node', 2)} && {count.format('lit', 1)}"
        hold = "document.getElementById('pause').click()"
        page.until(f"{seen} ? ({hold}, true) : ({over} && {again}, false)")
        assert page.run("document.querySelectorAll('#tree path').length") >= 2 and page.run(seen)
        assert "drafted" in page.run("document.getElementById('about').textContent")
        page.until("document.querySelectorAll('#accepted rect').length > 0")
        page.until("document.querySelectorAll('#stages rect').length === 5")
        look = "getComputedStyle(document.body).backgroundColor + getComputedStyle(document.querySelector('h1')).color"
        light = page.run(look)
        page.picture(tmp_path / "light.png")
        page.scheme("dark")
        dark = page.run(look)
        page.picture(tmp_path / "dark.png")
        assert light == "rgb(247, 248, 250)rgb(22, 32, 44)" and dark == "rgb(16, 21, 27)rgb(228, 234, 240)"
        assert page.urls and all(url.startswith(f"{ready.url}/") for url in page.urls), page.urls
        assert not any(KEY in url or "wrong-key" in url for url in page.urls)
        gone = re.compile(r"/v1/requests/\S+/rounds: .* 404 ")  # it ended between the list and the click
        assert [e for e in page.errors if "401" not in e and not gone.search(e)] == []
