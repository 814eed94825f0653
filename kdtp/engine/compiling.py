"""Requests that wait for their grammar: a thread compiles, which may take seconds, and the rounds of others go on."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from kdtp.engine.outcome import Event
from kdtp.engine.request import Request
from kdtp.engine.scheduler import QueueFull
from kdtp.messages import Failed, Finished
from kdtp.spec.grammar import Matcher
from kdtp.types import Grammar

_AGAIN = 2.0  # seconds until there may be room


class Compiling:
    """At most `most` requests, one after the other. wake: a file that can be read when one is done."""

    def __init__(self, compile_: Callable[[Grammar], Matcher], most: int) -> None:
        self._compile = compile_
        self._most = most
        self._thread = ThreadPoolExecutor(1, "grammars")
        self._waiting: dict[Request, Future[Matcher]] = {}
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Compile the grammar that it has. QueueFull if too many wait."""
        assert request.params.grammar is not None, "nothing to compile"
        if len(self) >= self._most:
            raise QueueFull(f"{len(self)} grammars wait to be compiled, the limit is max_queue {self._most}", _AGAIN)
        self._waiting[request] = self._thread.submit(self._compile, request.params.grammar)
        self._waiting[request].add_done_callback(lambda _: os.eventfd_write(self.wake, 1))

    def take(self) -> list[tuple[Request, Future[Matcher]]]:
        """Requests that wait no more, and what came of their grammars."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake)
        done = [request for request, future in self._waiting.items() if future.done()]
        return [(request, self._waiting.pop(request)) for request in done]

    def cancel(self, request_id: int) -> Event | None:
        """End a request that waits; None if none of that id does."""
        request = next((request for request in self._waiting if request.id == request_id), None)
        if request is None:
            return None
        self._waiting.pop(request).cancel()
        return Event(Finished(request_id, "cancelled", request.usage()))

    def fail_all(self, code: str, text: str) -> list[Event]:
        """The terminal events of those that wait, when the engine ends."""
        requests, self._waiting = list(self._waiting), {}
        self._thread.shutdown(wait=False, cancel_futures=True)
        return [Event(Failed(request.id, code, text)) for request in requests]
