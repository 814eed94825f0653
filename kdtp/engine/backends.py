"""What stands behind an Engine: the coordinator in this process, or a group of processes that it drives."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from kdtp.engine.child import Child
from kdtp.engine.plan import Plan
from kdtp.engine.request import Request
from kdtp.engine.rpc import EngineBusy, Labelled, Reply
from kdtp.engine.scheduler import QueueFull
from kdtp.messages import Terminal
from kdtp.types import SamplingParams

if TYPE_CHECKING:
    from kdtp.engine.coordinator import Coordinator

OnProgress = Callable[[int, int], None]
_MOMENT = 0.2  # seconds that `wait` waits for a process, so that a user who wants to stop is soon heard


class Backend(Protocol):
    """Requests by label; EngineBusy, EngineDead as of rpc.Client.

    wait: events of the requests named, perhaps none, after a step of the engine or a moment, so that the caller can
    think again. rounds: that are shown, too, from the first on; watch: show the next ones. cancel: end a request; its
    Finished still comes. forget: end it, nothing comes.
    """

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, speculate: bool, want_logits: bool, rounds: int
    ) -> int: ...
    def wait(self, requests: Iterable[int]) -> list[Labelled]: ...
    def watch(self, request: int, rounds: int) -> None: ...
    def cancel(self, request: int) -> None: ...
    def forget(self, request: int) -> None: ...
    def close(self) -> None: ...


class Closed:
    """What is behind an Engine after `close`."""

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, speculate: bool, want_logits: bool, rounds: int
    ) -> int:
        raise ValueError("the engine is closed")

    def wait(self, requests: Iterable[int]) -> list[Labelled]:
        raise ValueError("the engine is closed")

    def watch(self, request: int, rounds: int) -> None: ...

    def cancel(self, request: int) -> None: ...

    def forget(self, request: int) -> None: ...

    def close(self) -> None: ...


class InProcess:
    """The coordinator and its only rank, in this process and thread: a round runs when somebody waits for events."""

    def __init__(self, plan: Plan, tell: OnProgress) -> None:
        from kdtp.engine.assemble import assemble, local_link  # torch, only needed here

        self._coordinator: Coordinator
        self._coordinator, handshake = assemble(plan, [local_link(tell)])
        while not handshake.advance(0.1):
            tell(*handshake.loaded)
        tell(*handshake.loaded)
        self._events: dict[int, deque[Reply]] = {}
        self._opened = 0

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, speculate: bool, want_logits: bool, rounds: int
    ) -> int:
        self._opened += 1
        try:
            self._coordinator.submit(Request(self._opened, tuple(prompt), params, speculate, want_logits))
        except QueueFull as error:
            raise EngineBusy(str(error), error.retry_after) from None
        self._events[self._opened] = deque()
        self._coordinator.watch(self._opened, rounds)
        return self._opened

    def wait(self, requests: Iterable[int]) -> list[Labelled]:
        labels = sorted(requests)
        if not any(self._events[r] for r in labels):
            for event in self._coordinator.step():
                assert event.message.request is not None
                self._events[event.message.request].append((event.message, event.logits))
        return [(r, *reply) for r in labels for reply in self._take(r)]

    def _take(self, request: int) -> list[Reply]:
        replies = list(self._events[request])
        self._events[request].clear()
        if replies and isinstance(replies[-1][0], Terminal):
            del self._events[request]
        return replies

    def watch(self, request: int, rounds: int) -> None:
        self._coordinator.watch(request, rounds)

    def cancel(self, request: int) -> None:
        event = self._coordinator.cancel(request)
        if event is not None:
            self._events[request].append((event.message, event.logits))

    def forget(self, request: int) -> None:
        self._events.pop(request, None)
        self._coordinator.cancel(request)

    def close(self) -> None:
        self._coordinator.fleet.close()


class Group:
    """A `kdtp engine` process of our own with its coordinator and workers."""

    def __init__(self, plan: Plan, tell: OnProgress) -> None:
        self._child = Child(plan)
        self._client = self._child.client()
        try:
            self._wait_until_ready(plan.config.load_timeout, tell)
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, seconds: float, tell: OnProgress) -> None:
        deadline = time.monotonic() + seconds
        state = "loading"
        while state == "loading":
            status = self._client.status(max(0.0, deadline - time.monotonic()))
            tell(status.load_done, status.load_total)
            state = status.state
            time.sleep(0.05)

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, speculate: bool, want_logits: bool, rounds: int
    ) -> int:
        return self._client.submit(prompt, params, speculate, want_logits, watch=rounds)

    def wait(self, requests: Iterable[int]) -> list[Labelled]:
        return self._client.poll(requests, _MOMENT)

    def watch(self, request: int, rounds: int) -> None:
        self._client.watch(request, rounds)

    def cancel(self, request: int) -> None:
        self._client.cancel(request)

    def forget(self, request: int) -> None:
        self._client.cancel(request)
        self._client.forget(request)

    def close(self) -> None:
        self._child.end()
        self._client.close()
        self._child.tidy()
