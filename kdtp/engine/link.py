"""How the coordinator and its workers talk: one link per rank, in process (LocalLink) or to another one (ZmqLink).

Both carry the structs of kdtp.messages. Two processes are introduced over ZeroMQ, by Hello and Welcome; what follows
goes over a lane (engine.lane); the worker's end of it is engine.rankend. A frame that cannot be read, comes from a
stranger, or belongs to another epoch or step is dropped and counted; only a missing answer, a dead process or a Fault
ends the engine (EngineFault).
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import zmq

from kdtp.drafting import Drafts
from kdtp.engine import lane, rundir
from kdtp.engine.lane import MAX_FRAME, Lane
from kdtp.log import logger
from kdtp.messages import Fault, FromWorker, Hello, Ids, Progress, Ready, Shutdown, ToWorker, Welcome

MOST_AT_ONCE = 64  # frames taken from a socket before the next thing is done
_HIGH_WATER = 1000  # messages; an introduction has two
LINGER = 0.2  # seconds for what is said last to leave

Arrived = tuple[FromWorker, bytes | None]
Payload = bytes | Callable[[], bytes] | None  # of a message; or what gives it once it is there
M = TypeVar("M")


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
        """Hand `message` over."""

    def receive(self) -> Arrived | None:
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
        self._inbox: deque[tuple[FromWorker, Payload]] = deque()

    def emit(self, message: FromWorker, frame: Payload = None) -> None:
        """The worker's way back."""
        self._inbox.append((message, frame))

    @property
    def pending(self) -> bool:
        """Whether `receive` has a message."""
        return bool(self._inbox)

    def send(self, message: ToWorker) -> None:
        assert self.handle is not None, "a local link without its worker"
        self.handle(message)

    def receive(self) -> Arrived | None:
        if not self._inbox:
            return None
        message, frame = self._inbox.popleft()
        return message, frame() if callable(frame) else frame

    def close(self) -> None:
        self.handle = None


class ZmqLink:
    """A worker in another process. The first valid Hello for this rank fixes its peer, whose process alone may open the
    lane; others are strangers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], folder: Path, rank: int) -> None:
        self.rank = rank
        self.dropped: Counter[str] = Counter()
        self.hello: Hello | None = None
        self.last_step, self.answered = 0, 0.0  # the last step that was answered, and when (time.monotonic())
        self.pidfd: int | None = None
        self.lane: Lane | None = None
        self._peer: bytes | None = None
        self._failed = False
        self._hello_decoder = msgspec.msgpack.Decoder(Hello | Fault)
        self._decoder = msgspec.msgpack.Decoder(Progress | Ready | Ids | Drafts | Fault)
        self.socket = context.socket(zmq.ROUTER)
        tune(self.socket)
        self.socket.bind(rundir.endpoint(folder, f"rank-{rank}"))
        self.listener = lane.listen(rundir.lane(folder, rank))

    @property
    def ended(self) -> str:
        """Why the rank will say nothing more; "" if it may."""
        return self.lane.ended if self.lane else ""

    def send(self, message: ToWorker) -> None:
        """EngineFault if the rank is gone before it has a lane, or has none for a step."""
        frame = msgspec.msgpack.encode(message)
        if self.lane is not None and not isinstance(message, Welcome):
            self.lane.send(frame)
        elif isinstance(message, Welcome | Shutdown):
            self._introduce(frame)
        else:
            raise EngineFault(f"rank {self.rank} has opened no lane for a {type(message).__name__}")

    def _introduce(self, frame: bytes) -> None:
        assert self._peer is not None, f"rank {self.rank} has not said hello"
        try:
            self.socket.send_multipart([self._peer, frame])
        except zmq.ZMQError as error:
            raise EngineFault(f"rank {self.rank} cannot be reached: {error}") from None

    def receive(self) -> Arrived | None:
        """From the lane."""
        if self.lane is None:
            return None
        for _ in range(MOST_AT_ONCE):  # a flood of frames to drop must not hold up the rest
            found = self.lane.receive()
            if found is None:
                return None
            message = self._read(self._decoder, found[0])
            if message is not None:
                self._failed = self._failed or isinstance(message, Fault)
                return message, found[1]
        return None

    def told_fault(self) -> bool:
        """Whether the rank has said that it failed. What else it has said is lost: this is for an engine's end."""
        while not self._failed and self.receive() is not None:
            pass
        return self._failed

    def greet(self) -> Arrived | None:
        """From ZeroMQ: the rank's hello, or why it has no lane."""
        for _ in range(MOST_AT_ONCE):
            try:
                peer, *frames = self.socket.recv_multipart()
            except zmq.Again:
                return None
            message = self._from(peer, frames)
            if message is not None:
                return message, None
        return None

    def accept(self) -> None:
        """Take the lane of the process that has said hello."""
        for _ in range(MOST_AT_ONCE):
            try:
                connected, _ = self.listener.accept()
            except BlockingIOError:
                return
            pid = lane.peer(connected)
            if self.lane is None and self.hello is not None and pid == self.hello.pid:
                self.lane = Lane(connected)
            else:
                connected.close()
                self._drop("stranger", f"a lane of process {pid}")

    def _from(self, peer: bytes, frames: list[bytes]) -> FromWorker | None:
        if len(frames) != 1:
            self._drop("malformed", f"{len(frames)} frames")
            return None
        message = self._read(self._hello_decoder, frames[0])
        if message is None:
            return None
        if isinstance(message, Hello) and self._peer is None and message.rank == self.rank:
            self._adopt(peer, message)
        if peer == self._peer:
            return message
        self._drop("stranger", type(message).__name__)
        if isinstance(message, Hello) and self._peer is not None:
            self._refuse(peer, f"rank {self.rank} is already attached")
        return None

    def _read(self, decoder: msgspec.msgpack.Decoder[M], frame: bytes) -> M | None:
        try:
            return decoder.decode(frame)
        except (msgspec.DecodeError, RecursionError) as error:  # too deeply nested is the latter
            self._drop("malformed", " ".join(str(error).split()))
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
        self.listener.close()
        if self.lane is not None:
            self.lane.close(LINGER)
        self.socket.close(int(1000 * LINGER))
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None
