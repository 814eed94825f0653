"""A headless Chromium, driven over its debugging pipe: no driver, no port."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
 --disable-component-update --disable-sync --disable-dev-shm-usage --disable-extensions --hide-scrollbars
 --remote-debugging-pipe --window-size=1280,1000"""


def find() -> str | None:
    """The path of a Chromium, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One browser with one page; a context manager. `urls`: what it has asked for; `errors`: what its scripts and its
    policy complained of."""

    def __init__(self, program: str, folder: Path) -> None:
        read, self._out = os.pipe()
        self._in, write = os.pipe()
        # Chromium reads file 3 and writes file 4.
        theirs = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (read, write)]
        script = f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}'
        command = ["bash", "-c", script, "bash", program, *_FLAGS.split(), f"--user-data-dir={folder}"]
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, pass_fds=theirs, start_new_session=True, **quiet)
        for fd in (read, write, *theirs):
            os.close(fd)
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.urls: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("Page.navigate", url=url)

    def scheme(self, name: str) -> None:
        """What the person prefers: "light" or "dark"."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, script: str, seconds: float = 20.0) -> Any:
        """Wait until an expression is true; its value."""
        deadline = time.monotonic() + seconds
        while not (found := self.run(script)):
            assert time.monotonic() < deadline, f"{script}: not within {seconds} s; {self.errors}"
            time.sleep(0.05)
        return found

    def picture(self, path: Path) -> None:
        """A screenshot as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """One command of the DevTools protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self, seconds: float = 30.0) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert select.select([self._in], [], [], seconds)[0], "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Network.requestWillBeSent":
                self.urls.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(params["exceptionDetails"])[:500])
            case "Log.entryAdded":
                self.errors.append(f"{params['entry'].get('url', '')}: {params['entry']['text']}")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self._session = None
            self.call("Browser.close")
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(5)
        os.close(self._in)
        os.close(self._out)
