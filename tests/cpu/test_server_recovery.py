"""The engine dies behind the server: streams go on without a lost or repeated token; or all is told and ended."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager

import openai
import pytest

from tests.processes import TINY, kdtp, until
from tests.service import EXTRA, KEY, TEXT, Reader, Service

pytestmark = [pytest.mark.xdist_group("server-recovery"), pytest.mark.timeout(180)]

SAMPLED = {"prompt": [5, 6, 7], "max_tokens": 120, "temperature": 0.9, "seed": 11, "logprobs": 1}
GREEDY = {"prompt": [1, 2, 3, 4], "max_tokens": 120, "temperature": 0.0}
WHOLE = {"prompt": [9, 8], "max_tokens": 80, "temperature": 0.7, "seed": 2, "n": 2}


def under_way(*readers: Reader) -> None:
    before = [len(reader.chunks) for reader in readers]

    def go_on() -> bool:
        return all(len(reader.chunks) > count + 5 for reader, count in zip(readers, before, strict=True))

    until(go_on, 60, "the streams go on")


def test_an_engine_that_dies_is_no_end(tmp_path):
    with Service(tmp_path, "--max-restarts", 1, "--keep-alive", 0.5, tp=2) as service:
        client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0)
        alone = [client.completions.create(model="tiny", **body, **EXTRA) for body in (SAMPLED, GREEDY, WHOLE)]

        whole: list = []
        asking = threading.Thread(
            target=lambda: whole.append(client.completions.create(model="tiny", **WHOLE, **EXTRA))
        )
        asking.start()
        readers = [Reader(service, SAMPLED), Reader(service, GREEDY)]
        under_way(*readers)
        service.find("host").kill()
        until(lambda: service.health()[1]["state"] == "restarting", 20, "health tells the truth")
        status, answer, headers = service.call("POST", "/v1/completions", {"prompt": "x"})
        assert (status, answer["error"]["code"]) == (503, "restarting") and headers["retry-after"]
        for reader, truth in zip(readers, alone, strict=False):
            reader.join(60)
            assert reader.error is None and reader.reasons() == ["length"]
            assert reader.text == truth.choices[0].text
        assert readers[0].logprobs() == alone[0].choices[0].logprobs.token_logprobs
        asking.join(60)
        assert [c.text for c in whole[0].choices] == [c.text for c in alone[2].choices]
        assert whole[0].usage.completion_tokens == alone[2].usage.completion_tokens == 160
        assert service.health()[1]["restarts"] == 1

        last = [Reader(service, body | {"max_tokens": 500}) for body in (SAMPLED, GREEDY)]
        under_way(*last)
        service.find("worker").kill()  # once too often
        for reader in last:
            reader.join(30)
            assert "2 engines died" in str(reader.error) and "rank 0" in str(reader.error)
            assert reader.reasons() == []
        assert service.process.wait(30) == 70
        assert not [p for p in service.seen if p.is_running() and p.status() != "zombie"]
        assert "giving up: 2 engines died" in service.text()


def test_a_full_queue_and_an_end_by_two_signals(tmp_path):
    with Service(tmp_path, "--shutdown-timeout", 60, "--max-queue-tokens", 8, "--strict-params") as service:
        status, answer, _ = service.call("POST", "/v1/completions", {"prompt": [1] * 3, "n": 3})
        assert status == 400 and "at most 8 tokens may wait (--max-queue-tokens), not 9" in answer["error"]["message"]
        answers: list = []
        body = {"prompt": [1] * 5, "max_tokens": 1}
        askers = [
            threading.Thread(target=lambda: answers.append(service.call("POST", "/v1/completions", body)))
            for _ in range(2)
        ]
        service.find("host").suspend()  # so that both come at once
        for asker in askers:
            asker.start()
        until(lambda: len(service.call("GET", "/v1/requests")[1]["data"]) == 2, 20, "both are there")
        time.sleep(0.5)  # and sent
        service.find("host").resume()
        for asker in askers:
            asker.join(20)
        (_, (status, answer, headers)) = sorted(answers, key=lambda answer: answer[0])
        assert (status, answer["error"]["code"]) == (503, "overloaded") and int(headers["retry-after"]) >= 1
        for field, name in ((b'"tempratur":1', "tempratur"), (b'"n":1,"n":1', "n")):
            status, answer, _ = service.call("POST", "/v1/completions", b'{"prompt":"x",' + field + b"}")
            assert (status, answer["error"]["param"]) == (400, name) and "--strict-params" in answer["error"]["message"]
        short, long = Reader(service, GREEDY | {"max_tokens": 30}), Reader(service, SAMPLED | {"max_tokens": 500})
        until(lambda: long.chunks and short.chunks, 30, "under way")
        service.family()
        service.process.send_signal(signal.SIGHUP)
        until(lambda: service.health()[1]["state"] == "draining", 20, "draining")
        assert service.call("POST", "/v1/completions", {"prompt": "x"})[0] == 503
        short.join(30)
        assert short.reasons() == ["length"] and short.error is None
        service.process.terminate()  # a second signal: now
        assert service.process.wait(30) == 0
        long.join(30)
        assert "told to end" in str(long.error) and long.reasons() == []
        assert not [p for p in service.seen if p.is_running() and p.status() != "zombie"]
        assert "Traceback" not in service.text()


def test_a_taken_port_and_an_end_while_loading(tmp_path):
    with Service(tmp_path, wait=False) as service:
        second = kdtp("serve", "--model", TINY, "--tokenizer", TEXT, "--port", service.port)
        assert second.returncode == 2 and f"--port {service.port}" in second.stderr, second.stderr
        assert service.end(seconds=30) == 0
        assert "Traceback" not in service.text()


@contextmanager
def nohup():
    """What is started meanwhile does not hear of hangups."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_killed_server_leaves_nothing_and_its_port_is_free(tmp_path):
    """And a hangup, for one that nohup has started, is nothing to any of its processes."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with nohup(), Service(tmp_path / "a", tp=2) as first:
        reader = Reader(first, GREEDY | {"max_tokens": 490})
        until(lambda: reader.chunks, 30, "under way")
        for process in first.family():
            process.send_signal(signal.SIGHUP)
        under_way(reader)
        health = first.health()[1]
        assert (health["state"], health["restarts"]) == ("ready", 0)
        first.process.kill()
        until(lambda: not [p for p in first.seen if p.is_running() and p.status() != "zombie"], 20, "all of it gone")
        reader.join(30)
        with Service(tmp_path / "b", "--port", first.port, wait=False) as second:
            assert second.port == first.port and second.health()[1]["state"] in ("loading", "ready")
