"""The answer to one generation request: runs its choices, streams or collects them, ends them if the client leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from kdtp.log import logger
from kdtp.messages import Failed, Finished, Refused, Scored, Tokens, Usage
from kdtp.server.choice import Choice, Grown
from kdtp.server.driver import Driver
from kdtp.server.errors import ApiError, of_terminal
from kdtp.server.forms import Form, Json
from kdtp.server.journal import Job, Told
from kdtp.server.prompts import Ask

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
EVENTS = b"text/event-stream; charset=utf-8"
NOT_KEPT = (b"cache-control", b"no-cache")


@dataclass(frozen=True)
class Style:
    """How the client wants it. ping: seconds of silence after which a stream says that it lives; grammar: the field
    that asked for one, if there is one."""

    id: str
    model: str
    fingerprint: str
    stream: bool
    include_usage: bool
    ping: float
    grammar: str = "response_format"
    created: int = field(default_factory=lambda: int(time.time()))


class Answer:
    """An ASGI response: `choices` are those of `asks`, per_prompt of them for each prompt.

    Its jobs start with it, and none is left when it ends, however it does.
    """

    def __init__(
        self, driver: Driver, asks: Sequence[Ask], choices: Sequence[Choice], per_prompt: int, form: Form, style: Style
    ) -> None:
        self._driver = driver
        self._choices = choices
        self._per_prompt = per_prompt
        self._form, self._style = form, style
        self._events: asyncio.Queue[tuple[int, Told]] = asyncio.Queue()
        self._jobs = [self._job(i, ask) for i, ask in enumerate(asks)]
        self._usages = [Usage() for _ in asks]

    def _job(self, index: int, ask: Ask) -> Job:
        def tell(event: Told) -> None:
            self._events.put_nowait((index, event))

        return Job(ask.prompt, ask.params, tell, ask.ends, self._style.id, index, ask.extra)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, unless the client leaves first."""
        work = asyncio.create_task(self._stream(send) if self._style.stream else self._whole(send))
        gone = asyncio.create_task(until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                logger.info("%s: the client has left", self._style.id)
        finally:
            for task in (work, gone):
                task.cancel()
            for job in self._jobs:
                self._driver.cancel(job)

    # ------------------------------------------------------------------ whole or in chunks

    async def _whole(self, send: Send) -> None:
        self._submit()
        async for index, grown in self._grown():
            if grown is not None:
                self._form.keep(index, grown)
        body = self._object(self._form.whole, self._form.choices()) | {"usage": self._usage()}
        data = msgspec.json.encode(body)
        await start_answer(send, b"application/json", (b"content-length", str(len(data)).encode()))
        await send_part(send, data, more=False)

    async def _stream(self, send: Send) -> None:
        self._submit()
        growing = self._grown()
        # What the engine refuses at once is an answer with a status of its own.
        first = await anext(growing, None)
        await start_answer(send)
        try:
            for index in range(len(self._choices)):
                await self._chunks(send, self._form.begin(index))
            if first is not None:
                await self._show(send, *first)
            async for index, grown in growing:
                await self._show(send, index, grown)
            if self._style.include_usage:
                await send_event(send, self._object(self._form.chunk, []) | {"usage": self._usage()})
        except ApiError as error:
            await send_event(send, error.body())
        except (OSError, asyncio.CancelledError):
            raise  # there is nobody to tell
        except Exception as error:
            logger.exception("%s: the stream failed", self._style.id)
            await send_event(send, ApiError(500, f"internal error: {type(error).__name__}").body())
        await send_part(send, DONE, more=False)

    async def _show(self, send: Send, index: int, grown: Grown | None) -> None:
        if grown is None:
            await send_part(send, PING)
        else:
            await self._chunks(send, self._form.chunks(index, grown))

    async def _chunks(self, send: Send, choices: Sequence[Json]) -> None:
        for choice in choices:
            chunk = self._object(self._form.chunk, [choice])
            await send_event(send, chunk | ({"usage": None} if self._style.include_usage else {}))

    # ------------------------------------------------------------------ what the engine tells

    def _submit(self) -> None:
        for job in self._jobs:
            self._driver.submit(job)

    async def _grown(self) -> AsyncIterator[tuple[int, Grown | None]]:
        """How the choices grow, until all have ended; None after a silence. ApiError when one fails."""
        ended = 0
        while ended < len(self._choices):
            try:
                index, event = await asyncio.wait_for(self._events.get(), self._style.ping)
            except TimeoutError:
                yield 0, None
                continue
            choice = self._choices[index]
            if choice.ended:
                continue
            if isinstance(event, Scored):
                self._form.scored(index, event.logprobs)
                continue
            grown = self._grow(index, choice, event)
            ended += choice.ended
            yield index, grown

    def _grow(self, index: int, choice: Choice, event: Tokens | Finished | Failed | Refused) -> Grown:
        if isinstance(event, Failed | Refused):
            raise of_terminal(event, self._style.grammar)
        if isinstance(event, Finished):
            self._usages[index] = event.usage
            return choice.end(event.reason)
        grown = choice.take(event)
        if choice.ended:  # by a stop string, of which the engine does not know
            self._driver.cancel(self._jobs[index], "stop")
        return grown

    # ------------------------------------------------------------------ objects

    def _object(self, kind: str, choices: Sequence[Json]) -> dict[str, Any]:
        style = self._style
        return {
            "id": style.id,
            "object": kind,
            "created": style.created,
            "model": style.model,
            "system_fingerprint": style.fingerprint,
            "choices": choices,
        }

    def _usage(self) -> Json:
        prompt = sum(len(job.prompt) for job in self._jobs[:: self._per_prompt])
        cached = sum(usage.cached_tokens for usage in self._usages[:: self._per_prompt])
        said = sum(choice.used for choice in self._choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": said,
            "total_tokens": prompt + said,
            "prompt_tokens_details": {"cached_tokens": cached},
            "kdtp": costs(self._usages),
        }


def costs(usages: Sequence[Usage]) -> Json:
    """What the choices cost together; one that a stop string ended is not in it."""
    return {
        "rounds": sum(usage.rounds for usage in usages),
        "committed": sum(usage.committed for usage in usages),
        "drafted_by_depth": _added([usage.drafted_by_depth for usage in usages]),
        "accepted_by_depth": _added([usage.accepted_by_depth for usage in usages]),
        "preemptions": sum(usage.preemptions for usage in usages),
        "timings_ms": {
            stage: round(sum(usage.timings_ms.get(stage, 0.0) for usage in usages), 3) for stage in _stages(usages)
        },
    }


def _added(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def _stages(usages: Sequence[Usage]) -> dict[str, None]:
    return dict.fromkeys(stage for usage in usages for stage in usage.timings_ms)


async def until_gone(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def start_answer(send: Send, kind: bytes = EVENTS, header: tuple[bytes, bytes] = NOT_KEPT) -> None:
    """The head of an answer, by default of a stream of events."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind), header]})


async def send_event(send: Send, value: object) -> None:
    """One event of a stream."""
    await send_part(send, b"data: " + msgspec.json.encode(value) + b"\n\n")


async def send_part(send: Send, data: bytes, more: bool = True) -> None:
    """Bytes of an answer. It waits for a client that does not read, until its connection is given up."""
    await send({"type": "http.response.body", "body": data, "more_body": more})
