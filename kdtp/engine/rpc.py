"""The coordinator's RPC: MessagePack over ZeroMQ, one ROUTER, any number of DEALER clients on the same machine.

A client sends Submit, Cancel, StatusQuery, ShutdownQuery; it gets Tokens (each with its position), one terminal
Finished or Failed per request, and Status. Neither side needs torch.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import msgspec
import zmq

from kdtp.engine.link import tune
from kdtp.log import logger
from kdtp.types import (
    Cancel,
    Failed,
    Finished,
    FromEngine,
    SamplingParams,
    ShutdownQuery,
    Status,
    StatusQuery,
    Submit,
    ToEngine,
)

MAX_REQUEST = 16 << 20  # bytes of one client message
_MAX_PROBLEM = 500  # characters of a complaint sent back

Reply = tuple[FromEngine, bytes | None]


class EngineDead(RuntimeError):
    """The engine ended, failed a request for a reason of its own, or no longer answers."""


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
        """All messages that have arrived, with their senders."""
        while True:
            try:
                client, *frames = self.socket.recv_multipart()
            except zmq.Again:
                return
            try:
                if len(frames) != 1:
                    raise msgspec.DecodeError(f"{len(frames)} frames, want 1")
                yield client, self._decoder.decode(frames[0])
            except msgspec.DecodeError as error:
                self.dropped["malformed_rpc"] += 1
                problem = " ".join(str(error).split())[:_MAX_PROBLEM]
                logger.warning("rpc: dropped a malformed message: %s", problem)
                self.send(client, Failed(_label(frames), "invalid", problem))

    def send(self, client: bytes, message: FromEngine, frame: bytes | None = None) -> bool:
        """Whether the client could be given the message; False means that it is gone or far behind."""
        try:
            self.socket.send_multipart([client, msgspec.msgpack.encode(message)] + ([] if frame is None else [frame]))
        except zmq.ZMQError as error:
            self.dropped["unreachable_client"] += 1
            logger.info("rpc: a client is gone: %s", error)
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
    except (msgspec.DecodeError, KeyError, IndexError):
        return None


class Client:
    """A client of one engine. Not for use by several threads at once.

    alive: called while waiting; it raises when the caller knows that the engine is gone. silence: seconds without a
    sign of life after which the engine counts as dead.
    """

    def __init__(self, address: str, alive: Callable[[], None] | None = None, silence: float = 60.0) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        tune(self._socket)
        self._socket.setsockopt(zmq.SNDTIMEO, 200)
        self._socket.connect(address)
        self._decoder = msgspec.msgpack.Decoder(FromEngine)
        self._alive = alive or (lambda: None)
        self._silence = silence
        self._heard = time.monotonic()
        self._labels = 0
        self._events: dict[int, deque[Reply]] = {}
        self._status: Status | None = None

    def submit(
        self, prompt: Sequence[int], params: SamplingParams, speculate: bool = True, want_logits: bool = False
    ) -> int:
        """Start a request; its label."""
        self._labels += 1
        self._events[self._labels] = deque()
        self._send(Submit(self._labels, tuple(prompt), params, speculate, want_logits))
        return self._labels

    def cancel(self, request: int) -> None:
        """Ask for the end of a request; its Finished, reason "cancelled", still comes."""
        self._send(Cancel(request))

    def forget(self, request: int) -> None:
        """Ignore what still comes of a request."""
        self._events.pop(request, None)

    def shutdown(self) -> None:
        """Ask the engine to end."""
        self._send(ShutdownQuery())

    def status(self, timeout: float = 10.0) -> Status:
        """The engine's picture of itself; EngineDead after `timeout` seconds without an answer."""
        self._status = None
        deadline = time.monotonic() + timeout
        self._send(StatusQuery())
        while self._status is None:
            if time.monotonic() > deadline:
                raise EngineDead(f"no status within {timeout:.0f} s")
            self._pump(0.2)
        return self._status

    def events(self, request: int) -> Iterator[Reply]:
        """The request's events up to its terminal one."""
        for _, message, frame in self.any_events([request]):
            yield message, frame

    def any_events(self, requests: Sequence[int]) -> Iterator[tuple[int, FromEngine, bytes | None]]:
        """(request, event, logits) of several requests as they come, until each has had its terminal one."""
        open_ones = set(requests)
        while open_ones:
            for request in sorted(open_ones):
                queue = self._events[request]
                while queue:
                    message, frame = queue.popleft()
                    if isinstance(message, Finished | Failed):
                        open_ones.discard(request)
                        del self._events[request]
                    yield request, message, frame
            if open_ones and not any(self._events[r] for r in open_ones):
                self._pump(1.0)

    def _pump(self, seconds: float) -> None:
        """Wait for messages and sort them; EngineDead when the engine shows no life."""
        if not self._socket.poll(int(seconds * 1000)):
            self._alive()
            if time.monotonic() - self._heard > self._silence:
                raise EngineDead(f"no sign of life from the engine for {self._silence:.0f} s")
            self._send(StatusQuery())
            return
        while True:
            try:
                frames = self._socket.recv_multipart()
            except zmq.Again:
                return
            self._heard = time.monotonic()
            message = self._decoder.decode(frames[0])
            if isinstance(message, Status):
                self._status = message
            elif message.request in self._events:
                self._events[message.request].append((message, frames[1] if len(frames) > 1 else None))
            elif isinstance(message, Failed) and message.request is None:
                raise ValueError(f"the engine could not read a message: {message.message}")

    def _send(self, message: ToEngine) -> None:
        """Send; while the engine takes no messages (it starts, or hangs), wait as long as for a sign of life."""
        deadline = time.monotonic() + self._silence
        while True:
            try:
                self._socket.send(msgspec.msgpack.encode(message))
                return
            except zmq.Again:
                self._alive()
                if time.monotonic() > deadline:
                    raise EngineDead(f"the engine took no message for {self._silence:.0f} s") from None

    def close(self) -> None:
        """Close the connection; requests still open are cancelled by the engine when it next writes to us."""
        self._socket.close(200)
        self._context.term()
