"""A synthetic load on an endpoint: when each request is sent, what it asks for, and when each piece of text came."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from kdtp.client import Endpoint, EndpointError

Range = tuple[int, int]


@dataclass(frozen=True)
class Load:
    """What to send.

    rate: requests per second, at random (Poisson) times; 0: each as soon as another has ended. concurrency: most at
    once. prompt_tokens, max_tokens: of each request, drawn from first .. last. texts: instead of random ids, in turn.
    shared: leading tokens that all prompts have in common. timeout: seconds for one request.
    """

    model: str
    requests: int = 64
    concurrency: int = 8
    rate: float = 0.0
    prompt_tokens: Range = (64, 64)
    max_tokens: Range = (64, 64)
    vocab_size: int = 0
    texts: Sequence[str] = ()
    shared: int = 0
    temperature: float = 0.0
    speculate: bool = True
    seed: int = 0
    timeout: float = 300.0

    def bodies(self) -> Iterator[dict[str, Any]]:
        """The requests, the same for the same seed."""
        chance = random.Random(self.seed)
        common = [chance.randrange(self.vocab_size) for _ in range(self.shared)] if not self.texts else []
        for i in range(self.requests):
            size = max(1, chance.randint(*self.prompt_tokens) - len(common))
            own = [] if self.texts else [chance.randrange(self.vocab_size) for _ in range(size)]
            body: dict[str, Any] = {
                "model": self.model,
                "prompt": self.texts[i % len(self.texts)] if self.texts else common + own,
                "max_tokens": chance.randint(*self.max_tokens),
                "temperature": self.temperature,
                "seed": self.seed + i,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            yield body if self.speculate else body | {"speculate": False}


@dataclass
class Record:
    """What became of one request: times in seconds since the load began; times: of each piece of text."""

    due: float
    sent: float = 0.0
    times: list[float] = field(default_factory=list)
    ended: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    @property
    def tokens(self) -> int:
        """How many were said."""
        return int(self.usage.get("completion_tokens", 0))


async def run(endpoint: Endpoint, load: Load, tell: Callable[[Record], object] = lambda record: None) -> list[Record]:
    """Send the load; one record for each request, in the order sent. tell: called when one has ended."""
    chance, began = random.Random(load.seed + 1), time.monotonic()
    room = asyncio.Semaphore(load.concurrency)
    due, records, tasks = 0.0, [], []

    async def one(body: dict[str, Any], record: Record) -> None:
        try:
            await _one(endpoint, body, record, began, load.timeout)
        finally:
            room.release()
        tell(record)

    for body in load.bodies():
        if load.rate:
            due += chance.expovariate(load.rate)
            await asyncio.sleep(max(0.0, began + due - time.monotonic()))
        await room.acquire()
        record = Record(due if load.rate else time.monotonic() - began)
        records.append(record)
        tasks.append(asyncio.create_task(one(body, record)))
    await asyncio.gather(*tasks)
    return records


async def _one(endpoint: Endpoint, body: dict[str, Any], record: Record, began: float, timeout: float) -> None:
    record.sent = time.monotonic() - began
    try:
        async with asyncio.timeout(timeout):
            async for event in endpoint.stream("/v1/completions", body):
                if event.get("choices"):
                    record.times.append(time.monotonic() - began)
                record.usage = event.get("usage") or record.usage
        if not record.usage:
            record.error = "the answer had no usage"
    except EndpointError as error:
        record.error = str(error)
    except TimeoutError:
        record.error = f"not done within {timeout:g} s"
    record.ended = time.monotonic() - began
