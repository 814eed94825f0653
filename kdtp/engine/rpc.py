"""The coordinator's RPC: MessagePack over ZeroMQ, one ROUTER, any number of DEALER clients on the same machine.

A client sends Submit, Cancel, StatusQuery, ShutdownQuery; it gets Tokens (each with its position), one terminal
event per request (Finished, Failed or Refused), and Status. Neither side needs torch.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import zmq

from kdtp.engine.link import MOST_AT_ONCE, is_round, tune
from kdtp.log import logger
from kdtp.messages import Cancel, Failed, FromEngine, ShutdownQuery, Status, StatusQuery, Submit, Terminal, ToEngine
from kdtp.types import SamplingParams
from kdtp.watch import Watch

MAX_REQUEST = 16 << 20  # bytes of one client message
_BETWEEN = 0.1  # seconds from one look to the next that are waiting, too: a caller may look now and then, without one
_GRACE = 2.0  # seconds; what the engine itself finds out comes first
_LAST_WORDS = 200  # milliseconds; what the engine said before it ended may come behind the news of its end
_MAX_PROBLEM = 500  # characters of a complaint sent back

Reply = tuple[FromEngine, bytes | None]
Labelled = tuple[int, FromEngine, bytes | None]


class EngineDead(RuntimeError):
    """The engine ended, failed a request for a reason of its own, or no longer answers."""


class EngineBusy(RuntimeError):
    """The engine's queue is full: try again in about `retry_after` seconds. Nothing was lost."""

    def __init__(self, text: str, retry_after: float) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class Server:
    """The coordinator's end. Unreadable messages are answered with Failed "invalid" and counted in `dropped`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self.dropped: Counter[str] = Counter()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self.socket = context.socket(zmq.ROUTER)
        tune(self.socket, MAX_REQUEST)
        self.socket.setsockopt(zmq.SNDHWM, 10_000)  # events a slow client may lag behind before it counts as gone
        self.socket.bind(address)

    def receive(self) -> Iterator[tuple[bytes, ToEngine]]:
        """Messages that have arrived, with their senders; a bounded number, lest a flood stop the rounds."""
        for _ in range(MOST_AT_ONCE):
            try:
                client, *frames = self.socket.recv_multipart()
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise msgspec.DecodeError(f"{len(frames)} frames, want 1")
                yield client, self._decoder.decode(frames[0])
            except (msgspec.DecodeError, RecursionError) as error:
                self.dropped["malformed_rpc"] += 1
                problem = " ".join(str(error).split())[:_MAX_PROBLEM]
                if is_round(self.dropped["malformed_rpc"]):
                    logger.warning("rpc: dropped malformed message %d: %s", self.dropped["malformed_rpc"], problem)
                self.send(client, Failed(_label(frames), "invalid", problem))

    def send(self, client: bytes, message: FromEngine, frame: bytes | None = None) -> bool:
        """Whether the client could be given the message; False means that it is gone or far behind."""
        try:
            self.socket.send_multipart([client, msgspec.msgpack.encode(message)] + ([] if frame is None else [frame]))
        except zmq.ZMQError as error:
            self.dropped["unreachable_client"] += 1
            if is_round(self.dropped["unreachable_client"]):
                logger.info("rpc: message %d to a client that is gone: %s", self.dropped["unreachable_client"], error)
            return False
        return True

    def close(self, linger: float) -> None:
        """Close; messages under way get up to `linger` seconds."""
        self.socket.close(int(linger * 1000))


def _label(frames: Sequence[bytes]) -> int | None:
    """The request label of an unreadable Submit, so that its sender learns which of its requests failed."""
    try:
        raw = msgspec.msgpack.decode(frames[0], type=dict[str, msgspec.Raw])
        return msgspec.msgpack.decode(raw["request"], type=int)
    except (msgspec.DecodeError, RecursionError, KeyError, IndexError):
        return None


class Client:
    """A client of one engine. Not for use by several threads at once.

    alive: called while waiting; it raises when the caller knows that the engine is gone. silence: seconds of waiting
    without a sign of life after which the engine counts as dead, until it tells how long it may be silent
    (Status.patience); a process that was stopped or busy did not wait. An engine here that ends is noticed at once.
    wake: a file that ends the wait of `poll` once it can be read; whoever waits empties it.
    `latest`: the last Status that came; `usages`: whether all that are asked for have them.
    """

    def __init__(
        self, address: str, alive: Callable[[], None] | None = None, silence: float = 60.0, wake: int | None = None
    ) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        tune(self._socket)
        self._socket.setsockopt(zmq.SNDTIMEO, 200)
        self._socket.connect(address)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._wake = wake
        if wake is not None:
            self._poller.register(wake, zmq.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._alive = alive or (lambda: None)
        self._silence = silence
        self.usages = False
        self._waited, self._polled = 0.0, time.monotonic()  # seconds since the last sign of life; the last look
        self._labels = 0
        self._events: dict[int, deque[Reply]] = {}
        self.latest: Status | None = None
        self._engine: int | None = None  # pidfd of the coordinator
        self._send(StatusQuery())

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        speculate: bool = True,
        want_logits: bool = False,
        budget: int | None = None,
        priority: int = 0,
        salt: str = "",
        given: Sequence[int] = (),
        watch: int = 0,
    ) -> int:
        """Start a request, as of Submit; its label."""
        label = self._labels = self._labels + 1
        self._events[label] = deque()
        known = tuple(prompt), params, speculate, want_logits, budget, priority, salt, tuple(given), watch
        self._send(Submit(label, *known))
        return label

    def cancel(self, request: int) -> None:
        """Ask for the end of a request; its Finished, reason "cancelled", still comes."""
        self._send(Cancel(request))

    def watch(self, request: int, rounds: int) -> None:
        """Ask to be shown the next rounds of a request, as events of it."""
        self._send(Watch(request, rounds))

    def forget(self, request: int) -> None:
        """Ignore what still comes of a request."""
        self._events.pop(request, None)

    def shutdown(self) -> None:
        """Ask the engine to end."""
        self._send(ShutdownQuery())

    def status(self, timeout: float = 10.0) -> Status:
        """The engine's picture of itself; EngineDead after `timeout` seconds without an answer."""
        before = self.latest
        deadline = time.monotonic() + timeout
        self.ask()
        while self.latest is before or self.latest is None:
            if time.monotonic() > deadline:
                raise EngineDead(f"no status within {timeout:.0f} s")
            self._pump(0.2)
        return self.latest

    def ask(self) -> None:
        """Ask for a Status, which will be `latest`, without waiting for it."""
        self._send(StatusQuery(self._labels, self.usages))

    def events(self, request: int) -> Iterator[Reply]:
        """The request's events up to its terminal one."""
        for _, message, frame in self.any_events([request]):
            yield message, frame

    def any_events(self, requests: Sequence[int]) -> Iterator[Labelled]:
        """(request, event, logits) of several requests as they come, until each has had its terminal one."""
        open_ones = set(requests)
        while open_ones:
            for request, message, frame in self.wait(open_ones):
                if isinstance(message, Terminal):
                    open_ones.discard(request)
                yield request, message, frame

    def wait(self, requests: Iterable[int]) -> list[Labelled]:
        """At least one event of the open `requests`, after waiting for it. EngineDead when the engine is gone."""
        while not (got := self.poll(requests, 1.0)):
            pass
        return got

    def poll(self, requests: Iterable[int], seconds: float) -> list[Labelled]:
        """Events of the open `requests`; there may be none after waiting for a while. EngineDead as of `wait`."""
        labels = sorted(requests)
        got = [(r, *reply) for r in labels for reply in self._take(r)]
        if got:
            return got
        self._pump(seconds)
        return [(r, *reply) for r in labels for reply in self._take(r)]

    def _take(self, request: int) -> list[Reply]:
        replies = list(self._events[request])
        self._events[request].clear()
        if replies and isinstance(replies[-1][0], Terminal):
            del self._events[request]
        return replies

    def _pump(self, seconds: float) -> None:
        """Wait for messages and sort them; EngineDead when the engine shows no life."""
        ready = dict(self._poller.poll(int(seconds * 1000)))
        before, self._polled = self._polled, time.monotonic()
        self._waited += min(self._polled - before, max(seconds, _BETWEEN))
        if self._socket in ready or (self._engine in ready and self._socket.poll(_LAST_WORDS)):
            self._waited = 0.0
            with contextlib.suppress(zmq.Again):
                while True:
                    body, *frame = self._socket.recv_multipart()
                    self._sort(self._decoder.decode(body), frame[0] if frame else None)
        elif self._engine in ready:
            self._check()
            raise EngineDead("the engine has ended")
        elif self._wake not in ready:
            self._check()
            if self._waited > self._silence:
                raise EngineDead(f"no sign of life from the engine for {self._silence:.0f} s")
            self.ask()

    def _check(self) -> None:
        """EngineDead if it is known to have ended, with its own words if it left some."""
        if self.latest is not None and self.latest.fault:
            raise EngineDead(self.latest.fault)
        self._alive()

    def _sort(self, message: FromEngine, frame: bytes | None) -> None:
        if isinstance(message, Status):
            self.latest = message
            self._silence = message.patience + _GRACE
            self._watch(message.pid)
            self._find_lost(message)
        elif message.request in self._events:
            self._events[message.request].append((message, frame))
        elif isinstance(message, Failed) and message.request is None:
            raise ValueError(f"the engine could not read a message: {message.message}")

    def _watch(self, pid: int) -> None:
        """Poll for the end of the coordinator, if it runs on this machine."""
        if self._engine is None:
            with contextlib.suppress(OSError):
                self._engine = os.pidfd_open(pid)
                self._poller.register(self._engine, zmq.POLLIN)

    def _find_lost(self, status: Status) -> None:
        """End requests that the engine knows no more, although their end never came: it could not deliver it, or it is
        another engine at the same address."""
        for request, queue in self._events.items():
            ended = bool(queue) and isinstance(queue[-1][0], Terminal)
            if request <= status.upto and request not in status.open and not ended:
                text = "the engine gave up this request: its events could not be delivered"
                queue.append((Failed(request, "engine", text), None))

    def _send(self, message: ToEngine) -> None:
        """Send; while the engine takes no messages (it starts, or hangs), wait as long as for a sign of life."""
        deadline = time.monotonic() + self._silence
        while True:
            try:
                self._socket.send(msgspec.msgpack.encode(message))
                return
            except zmq.Again:
                self._check()
                if time.monotonic() > deadline:
                    raise EngineDead(f"the engine took no message for {self._silence:.0f} s") from None

    def close(self) -> None:
        """Close the connection; requests still open are cancelled by the engine when it next writes to us."""
        self._socket.close(200)
        self._context.term()
        if self._engine is not None:
            os.close(self._engine)
            self._engine = None
