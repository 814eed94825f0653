"""Random finishes and aborts of requests to a `kdtp serve` of the tiny model, and what they leave behind: nothing.

    python scripts/soak_serve.py [--requests 100000] [--concurrency 24] [--kv-tokens 640] [--tp 1]

A request is a stream or not, of one or more choices, greedy or sampled, with a stop string, a grammar or too many
tokens; its client reads all, or leaves before the end of its body, at once, or later. At the end no page may be in
use and no file, thread or request left open; memory is printed as it goes. Greedy answers must be the same every time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.processes import until  # noqa: E402
from tests.service import KEY, Service  # noqa: E402

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object", "maxProperties": 1}}}


def draw(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A request: path and body."""
    body: dict[str, Any] = {"max_tokens": chance.choice((1, 3, 8, 8, 40)), "stream": chance.random() < 0.6}
    if chance.random() < 0.3:
        body |= {"messages": [{"role": "user", "content": chance.choice(("Hi", "Why? " * 9))}]}
        body |= {"response_format": SCHEMA} if chance.random() < 0.2 else {}
        return "/v1/chat/completions", body
    body["prompt"] = [chance.randrange(512) for _ in range(chance.choice((1, 5, 70, 200)))]
    if chance.random() < 0.4:  # one of a few that come again and again
        body |= {"prompt": [7, chance.randrange(8), 9] * 30, "temperature": 0.0, "ignore_eos": True}
    body |= {"n": chance.choice((2, 3))} if chance.random() < 0.1 else {}
    body |= {"stop": [chance.choice("aeiou")]} if chance.random() < 0.2 else {}
    body |= {"max_tokens": 10**6} if chance.random() < 0.02 else {}  # refused, or left
    return "/v1/completions", body


class Soak:
    """The load on one service, and what came of it."""

    def __init__(self, service: Service, seed: int) -> None:
        self.service = service
        self.seen: Counter[str] = Counter()
        self._chance = random.Random(seed)
        self._texts: dict[str, str] = {}

    async def run(self, requests: int, concurrency: int) -> None:
        """Send so many requests, so many at once."""
        left = iter(range(requests))

        async def worker() -> None:
            for _ in left:
                async with asyncio.timeout(60):
                    await self._one()

        await asyncio.gather(*(worker() for _ in range(concurrency)))

    async def _one(self) -> None:
        path, body = draw(self._chance)
        leaves = self._chance.choice(("never", "never", "early", "at once", "later"))
        if body["max_tokens"] > 1000 and leaves == "never":
            leaves = "later"
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.service.port)
        try:
            writer.write(head.encode() + (data[: len(data) // 2] if leaves == "early" else data))
            if leaves == "later":
                await reader.read(self._chance.choice((1, 300, 900)))
            elif leaves == "never":
                self._check(body, await reader.read())
            elif self._chance.random() < 0.5:
                writer.transport.abort()
        finally:
            writer.close()
            self.seen[leaves] += 1
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    def _check(self, body: dict[str, Any], answer: bytes) -> None:
        """An answer that was read to its end is right."""
        head, _, text = answer.partition(b"\r\n\r\n")
        status = head[9:12].decode()
        self.seen[status] += 1
        assert status in ("200", "503"), answer[:500]
        if status == "200" and body["stream"]:
            assert text.count(b'"finish_reason":"') == body.get("n", 1) and b"[DONE]" in text, text[-500:]
        elif status == "200" and body.get("temperature") == 0.0:
            said = json.dumps([choice["text"] for choice in json.loads(text)["choices"]])
            asked = json.dumps({key: value for key, value in body.items() if key != "stream"})
            assert self._texts.setdefault(asked, said) == said, f"another text for {asked}"

    def settle(self) -> dict[str, float]:
        """Wait until nothing is open; figures of what is there then."""
        until(lambda: not self.service.call("GET", "/v1/requests")[1]["data"], 20, "no request left")

        def idle() -> bool:
            status = self.service.call("GET", "/v1/status")[1]
            return status["running"] == status["waiting"] == 0 and status["pages"]["free"] == status["pages"]["total"]

        until(idle, 10, "no page left")
        until(lambda: psutil.Process(self.service.process.pid).num_fds() < 60, 10, "no connection left")
        family = self.service.family()
        return {
            "memory": sum(p.memory_info().rss for p in family) / 1e6,
            "files": sum(p.num_fds() for p in family),
            "threads": sum(p.num_threads() for p in family),
            "preemptions": self._figure("kdtp:num_preemptions_total"),
        }

    def _figure(self, name: str) -> float:
        lines = self.service.call("GET", "/metrics")[1].splitlines()
        return float(next(line for line in lines if line.startswith(name)).rpartition(" ")[2])


def soak(service: Service, requests: int, concurrency: int, parts: int, seed: int = 0) -> list[dict[str, float]]:
    """Run the load in parts; the figures after each, when all is quiet."""
    load, figures = Soak(service, seed), []
    for _ in range(parts):
        started = time.monotonic()
        asyncio.run(load.run(requests // parts, concurrency))
        figures.append(load.settle() | {"per_second": requests // parts / (time.monotonic() - started)})
        counts = ", ".join(f"{name} {count}" for name, count in sorted(load.seen.items()))
        print("  ".join(f"{name} {value:.1f}" for name, value in figures[-1].items()), f" ({counts})", flush=True)
    return figures


def main() -> int:
    """Run the soak; 1 if memory, files or threads have grown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--concurrency", type=int, default=24)
    parser.add_argument("--parts", type=int, default=10)
    parser.add_argument("--kv-tokens", type=int, default=640)
    parser.add_argument("--tp", type=int, default=1)
    chosen = parser.parse_args()
    flags = ("--drafter", "ngram", "--kv-tokens", chosen.kv_tokens, "--log-level", "warning")
    with tempfile.TemporaryDirectory() as folder, Service(Path(folder), *flags, tp=chosen.tp) as service:
        figures = soak(service, chosen.requests, chosen.concurrency, chosen.parts)
    first, last = figures[min(1, len(figures) - 1)], figures[-1]
    grown = [name for name, most in (("memory", 50), ("files", 4), ("threads", 2)) if last[name] > first[name] + most]
    print(f"grown: {', '.join(grown) or 'nothing'}")
    return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
