"""How the coordinator and its workers talk: one link per rank, in process (LocalLink) or over ZeroMQ (ZmqLink).

Both carry the structs of kdtp.messages. A frame that cannot be read, comes from a stranger, or belongs to another epoch
or step is dropped and counted; only a missing answer, a dead process or a Fault ends the engine (EngineFault).
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq

from kdtp.engine.rundir import endpoint
from kdtp.log import logger
from kdtp.messages import FromWorker, Hello, Shutdown, ToWorker

MOST_AT_ONCE = 64  # frames taken from a socket before the next thing is done
MAX_FRAME = 256 << 20  # bytes; logits of a wide forward are the largest
_HIGH_WATER = 1000  # messages; the protocol never has more than two under way
_LINGER_MS = 200  # for a last Shutdown to leave
_FRAMES = (1, 2)  # a message, and perhaps one frame of raw bytes


class EngineFault(RuntimeError):
    """A rank died, hung, diverged or reported a fault: the engine cannot go on. The text names rank and cause."""


class Link(Protocol):
    """The coordinator's end of the way to one rank."""

    rank: int
    dropped: Counter[str]
    hello: Hello | None
    last_step: int
    answered: float

    def send(self, message: ToWorker) -> None:
        """Hand `message` over; EngineFault if the rank is gone."""

    def receive(self) -> tuple[FromWorker, bytes | None] | None:
        """The next message that has arrived, or None."""

    def close(self) -> None:
        """Give up the link's resources."""


def is_round(count: int) -> bool:
    """Whether the count-th thing of a kind is worth a line in the log: 1, 2, 5, 10, 20, 50, 100 …"""
    return str(count).rstrip("0") in ("1", "2", "5")


def tune(socket: zmq.Socket[bytes], max_frame: int = MAX_FRAME) -> None:
    """Options that every socket of ours needs: ZeroMQ's defaults lose messages or hang on close."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER)
    socket.setsockopt(zmq.MAXMSGSIZE, max_frame)
    socket.setsockopt(zmq.SNDTIMEO, 0)
    socket.setsockopt(zmq.RCVTIMEO, 0)
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # IMMEDIATE stays off: with it a DEALER throws away what it has received but not yet read when its peer closes,
    # and the last words of an engine are the ones that matter.


class LocalLink:
    """A worker in this process: `handle` runs it, what it emits is received here."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.dropped: Counter[str] = Counter()
        self.hello: Hello | None = None
        self.last_step, self.answered = 0, 0.0  # the last step that was answered, and when (time.monotonic())
        self.handle: Callable[[ToWorker], None] | None = None
        self._inbox: deque[tuple[FromWorker, bytes | None]] = deque()

    def emit(self, message: FromWorker, frame: bytes | None = None) -> None:
        """The worker's way back."""
        self._inbox.append((message, frame))

    @property
    def pending(self) -> bool:
        """Whether `receive` has a message."""
        return bool(self._inbox)

    def send(self, message: ToWorker) -> None:
        assert self.handle is not None, "a local link without its worker"
        self.handle(message)

    def receive(self) -> tuple[FromWorker, bytes | None] | None:
        return self._inbox.popleft() if self._inbox else None

    def close(self) -> None:
        self.handle = None


class ZmqLink:
    """A worker in another process. The first valid Hello for this rank fixes its peer; others are strangers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, rank: int) -> None:
        self.rank = rank
        self.dropped: Counter[str] = Counter()
        self.hello: Hello | None = None
        self.last_step, self.answered = 0, 0.0  # the last step that was answered, and when (time.monotonic())
        self.pidfd: int | None = None
        self._peer: bytes | None = None
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self.socket = context.socket(zmq.ROUTER)
        tune(self.socket)
        self.socket.bind(endpoint(folder, f"rank-{rank}"))

    def send(self, message: ToWorker) -> None:
        assert self._peer is not None, f"rank {self.rank} has not said hello"
        try:
            self.socket.send_multipart([self._peer, msgspec.msgpack.encode(message)])
        except zmq.ZMQError as error:
            raise EngineFault(f"rank {self.rank} cannot be reached: {error}") from None

    def receive(self) -> tuple[FromWorker, bytes | None] | None:
        for _ in range(MOST_AT_ONCE):  # a flood of frames to drop must not hold up the rest
            try:
                peer, *frames = self.socket.recv_multipart()
            except zmq.Again:
                return None
            message = self._read(peer, frames)
            if message is not None:
                return message, frames[1] if len(frames) > 1 else None
        return None

    def _read(self, peer: bytes, frames: list[bytes]) -> FromWorker | None:
        if len(frames) not in _FRAMES:
            self._drop("malformed", f"{len(frames)} frames")
            return None
        try:
            message = self._decoder.decode(frames[0])
        except (msgspec.DecodeError, RecursionError) as error:  # too deeply nested is the latter
            self._drop("malformed", " ".join(str(error).split()))
            return None
        if isinstance(message, Hello) and self._peer is None and message.rank == self.rank:
            self._adopt(peer, message)
        if peer == self._peer:
            return message
        self._drop("stranger", type(message).__name__)
        if isinstance(message, Hello) and self._peer is not None:
            self._refuse(peer, f"rank {self.rank} is already attached")
        return None

    def _adopt(self, peer: bytes, hello: Hello) -> None:
        try:
            self.pidfd = os.pidfd_open(hello.pid)
        except OSError as error:  # ended before it was welcomed; the launcher sees that, and a new one may come
            logger.warning("rank %d: hello from process %d: %s", self.rank, hello.pid, error)
            return
        self._peer = peer
        self.hello = hello

    def _drop(self, why: str, what: str) -> None:
        self.dropped[why] += 1
        if is_round(self.dropped[why]):
            logger.warning("rank %d: dropped %s frame number %d: %s", self.rank, why, self.dropped[why], what)

    def _refuse(self, peer: bytes, reason: str) -> None:
        try:
            self.socket.send_multipart([peer, msgspec.msgpack.encode(Shutdown(reason))])
        except zmq.ZMQError:
            logger.info("rank %d: the refused peer is gone", self.rank)

    def close(self) -> None:
        self.socket.close(_LINGER_MS)
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
