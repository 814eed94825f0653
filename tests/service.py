"""A real `kdtp serve` with its engine, for tests that are its clients."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import openai
import psutil

from tests.paths import REFS, TINY
from tests.processes import start, until

KEY = "a-key-of-the-tests"
TEXT = REFS / "tiny_text"


EXTRA = {"extra_body": {"ignore_eos": True, "speculate": False}}


class Service:
    """`kdtp serve` of the tiny model; a context manager that leaves nothing behind."""

    def __init__(self, tmp_path: Path, *flags: object, tp: int = 1, wait: bool = True) -> None:
        self.log = tmp_path / f"serve-{time.monotonic_ns()}.log"
        keys = tmp_path / "keys"
        keys.write_text(f"another-key-of-theirs\n{KEY}\n")
        shutil.copytree(TEXT, tmp_path / "model")
        model = shutil.copy(TINY, tmp_path / "model" / "model.kdtr")
        command = [sys.executable, "-m", "kdtp", "serve", "--model", model, "--tp", tp]
        command += ["--threads", 1, "--port", 0, "--api-key-file", keys, "--served-model-name", "tiny", *flags]
        self.process = start(command, self.log)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:"), self.text()
        self.port = int(self.url.rpartition(":")[2])
        self.seen: set[psutil.Process] = set()
        if wait:
            try:
                until(lambda: self.health()[0] == 200, 100, "ready")
            except BaseException as error:
                self.family()
                self.__exit__(type(error), error, None)
                raise

    def call(self, method: str, path: str, body: object = None, key: str | None = KEY, **headers: str) -> Any:
        """(status, JSON or text, headers) of one request; a body that is bytes goes as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}) | headers
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            raw = response.read()
        finally:
            connection.close()
        said = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(raw) if said else raw.decode(), response.headers

    def health(self) -> tuple[int, dict[str, Any]]:
        status, body, _ = self.call("GET", "/health", key=None)
        return status, body

    def post(self, path: str, **body: object) -> dict[str, Any]:
        """The answer to a request that must succeed."""
        status, answer, _ = self.call("POST", path, body)
        assert status == 200, answer
        return answer

    def raw(self, data: bytes, size: int = 1 << 16) -> bytes:
        """What comes first after some bytes on a socket of their own."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=20) as connection:
            connection.settimeout(20)
            with contextlib.suppress(OSError):
                connection.sendall(data)
            try:
                return connection.recv(size)
            except OSError:
                return b""

    def family(self) -> list[psutil.Process]:
        """Server, launcher, coordinator and workers."""
        server = psutil.Process(self.process.pid)
        found = [server, *server.children(recursive=True)]
        self.seen.update(found)
        return found

    def find(self, role: str) -> psutil.Process:
        """The coordinator ("host") or the first "worker" of the engine that runs."""
        return self.roles(role)[0]

    def roles(self, role: str) -> list[psutil.Process]:
        """Processes of a role ("launcher", "host", "worker") that are there now."""
        wanted = {"engine", "--end-with-stdin"} if role == "launcher" else {"kdtp.engine.start", role}
        found = []
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                if wanted <= set(process.cmdline()):
                    found.append(process)
        return found

    def text(self) -> str:
        return self.log.read_text()

    def end(self, number: int = signal.SIGTERM, seconds: float = 30.0) -> int:
        """Tell it to end; the exit code."""
        self.family()
        self.process.send_signal(number)
        return self.process.wait(seconds)

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.end()
        for process in self.seen:
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)
        self.process.wait(30)
        assert self.process.stdout is not None
        self.process.stdout.close()
        if error[0] is not None:
            print(self.text(), file=sys.stderr)


class Reader(threading.Thread):
    """A client that reads one stream to its end. start: at once, or when `start` is called."""

    def __init__(self, service: Service, body: dict, start: bool = True) -> None:
        super().__init__()
        self.client = openai.OpenAI(base_url=f"{service.url}/v1", api_key=KEY, max_retries=0)
        self.body = body
        self.chunks: list = []
        self.error: Exception | None = None
        if start:
            self.start()

    def run(self) -> None:
        try:
            stream = self.client.completions.create(model="tiny", stream=True, **self.body, **EXTRA)
            for chunk in stream:
                self.chunks.append(chunk)
        except openai.APIError as error:
            self.error = error

    @property
    def text(self) -> str:
        return "".join(c.choices[0].text for c in self.chunks)

    def reasons(self) -> list[str]:
        return [c.choices[0].finish_reason for c in self.chunks if c.choices[0].finish_reason]

    def logprobs(self) -> list[float]:
        return [v for c in self.chunks if c.choices[0].logprobs for v in c.choices[0].logprobs.token_logprobs]
