"""The worker's end of a link to another process: it says hello over ZeroMQ, is welcomed, and opens the lane."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
import zmq

from kdtp.drafting import Draft, Keep
from kdtp.engine import lane, rundir
from kdtp.engine.lane import Lane
from kdtp.engine.link import LINGER, Payload, tune
from kdtp.log import logger
from kdtp.messages import Commit, Forward, FromWorker, Shutdown, ToWorker, Welcome

WELCOME_TIMEOUT = 60.0  # seconds between hello and welcome
_BUSY = 0.02  # seconds; between two steps it is usually less
_LAST_PAUSE = 1.0  # seconds to stay after the coordinator has ended: the launcher asks all ranks for their stacks
M = TypeVar("M")


class RankEnd:
    """The worker's end of a ZmqLink."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._lane_path = rundir.lane(folder, rank)
        self._lane: Lane | None = None
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        tune(self._socket)
        self._socket.setsockopt(zmq.IDENTITY, f"rank-{rank}-{secrets.token_hex(8)}".encode())
        self._socket.setsockopt(zmq.SNDTIMEO, int(WELCOME_TIMEOUT * 1000))
        self._socket.connect(rundir.endpoint(folder, f"rank-{rank}"))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._welcome_decoder = msgspec.msgpack.Decoder(Welcome | Shutdown)
        self._decoder = msgspec.msgpack.Decoder(Forward | Keep | Commit | Draft | Shutdown)
        self._coordinator: int | None = None

    def emit(self, message: FromWorker, frame: Payload) -> None:
        """Send to the coordinator, once the frame has come."""
        frame = frame() if callable(frame) else frame
        body = msgspec.msgpack.encode(message)
        if self._lane is not None:
            self._lane.send(body, frame)
        else:
            self._socket.send(body)

    def join(self, coordinator_pid: int) -> None:
        """Open the lane: from now on all goes over it, and `receive` ends when that process does.

        Errors as lane.connect.
        """
        self._coordinator = os.pidfd_open(coordinator_pid)
        self._poller.register(self._coordinator, zmq.POLLIN)
        self._lane = lane.connect(self._lane_path)

    def receive(self, timeout: float | None, busy: bool = False) -> ToWorker | None:
        """The next readable message; None after `timeout` seconds, EOFError when the coordinator has ended.

        busy: if the lane may have a message soon, poll it for a while before sleeping.
        """
        now = time.monotonic()
        busy_until = now + _BUSY if busy else now
        while True:
            if (message := self._from_lane()) is not None:
                return message
            if time.monotonic() < busy_until:
                continue
            ready = self._poll(None if timeout is None else max(0, int((now + timeout - time.monotonic()) * 1000)))
            if not ready:
                return None
            if self._socket in ready and (message := self._read(self._welcome_decoder, self._socket.recv())):
                return message
            if list(ready) == [self._coordinator]:  # nothing is left to be read
                self._end()

    def _from_lane(self) -> ToWorker | None:
        message: ToWorker | None = None
        while message is None and self._lane is not None and (found := self._lane.receive()) is not None:
            message = self._read(self._decoder, found[0])
        if message is not None:
            return message
        if self._lane is not None and self._lane.ended:
            self._end()
        return None

    def _poll(self, milliseconds: int | None) -> dict[object, int]:
        if self._lane is not None:
            self._poller.register(self._lane.fileno(), zmq.POLLIN | (zmq.POLLOUT if self._lane.writes else 0))
        return dict(self._poller.poll(milliseconds))

    def _read(self, decoder: msgspec.msgpack.Decoder[M], frame: bytes) -> M | None:
        try:
            return decoder.decode(frame)
        except (msgspec.DecodeError, RecursionError) as error:
            logger.warning("dropped a malformed frame: %s", error)
            return None

    def _end(self) -> NoReturn:
        time.sleep(_LAST_PAUSE)
        raise EOFError("the coordinator ended")

    def close(self) -> None:
        """Let what was said last leave."""
        if self._lane is not None:
            self._lane.close(LINGER)
        else:
            time.sleep(LINGER)  # ZeroMQ's thread has it
