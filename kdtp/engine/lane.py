"""A lane: the Unix stream socket between the coordinator and a rank in another process, over which its steps go.

Only the kernel is between the two, so a message costs one wake-up, or none where the receiver polls. ZeroMQ's threads
make it two on either side, tens of microseconds each.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections import deque
from pathlib import Path

MAX_FRAME = 256 << 20  # bytes; logits of a wide forward are the largest
HEADER = struct.Struct("<II")  # bytes of the MessagePack, and of the raw frame behind it, 0 if there is none
_CHUNK = 1 << 18
_BACKLOG = 16
_CONNECT_TIMEOUT = 30  # seconds, if the backlog is full
_PEER = struct.Struct("3i")  # Linux's struct ucred: pid, uid, gid


class Lane:
    """One end. Only `close` waits: what cannot be written yet is kept and goes with a later call, what has come in part
    is completed by one.

    ended: why nothing more will come, behind what came before; "" until then. most: bytes of a message and of a frame.
    """

    def __init__(self, connected: socket.socket, most: int = MAX_FRAME) -> None:
        connected.setblocking(False)
        self.ended = ""
        self._socket = connected
        self._most = most
        self._chunk = bytearray(_CHUNK)  # one for all reads: who polls makes many that bring nothing
        self._in = bytearray()
        self._out: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def writes(self) -> bool:
        """Whether something waits to be written."""
        return bool(self._out)

    def send(self, message: bytes, frame: bytes | None = None) -> None:
        """Hand over a message. A peer that is gone is told by `receive`, behind its last words.

        ValueError if it is too large for the peer.
        """
        frame = frame or b""
        if max(len(message), len(frame)) > self._most:
            raise ValueError(f"a message of {len(message)} bytes with {len(frame)}: must be at most {self._most} each")
        self._out.append(memoryview(HEADER.pack(len(message), len(frame)) + message))
        if frame:
            self._out.append(memoryview(frame))
        self._write()

    def receive(self) -> tuple[bytes, bytes | None] | None:
        """The next message and its frame, if they have come whole."""
        if self._out:
            self._write()
        while (found := self._cut()) is None and self._read():
            pass
        return found

    def close(self, linger: float = 0.0) -> None:
        """Wait up to `linger` seconds for what is to be written, and close."""
        poller, deadline = select.poll(), time.monotonic() + linger
        poller.register(self._socket, select.POLLOUT)
        while self._out and (left := deadline - time.monotonic()) > 0:
            poller.poll(1000 * left)
            self._write()
        self._socket.close()

    def _write(self) -> None:
        try:
            while self._out:
                sent = self._socket.send(self._out[0])
                rest = self._out.popleft()[sent:]
                if rest:
                    self._out.appendleft(rest)
        except BlockingIOError:
            pass
        except OSError:  # the peer is gone
            self._out.clear()

    def _read(self) -> bool:
        """Whether anything came."""
        if self.ended:
            return False
        try:
            count = self._socket.recv_into(self._chunk)
        except BlockingIOError:
            return False
        except OSError as error:
            count, self.ended = 0, f"closed its lane ({error.strerror})"
        if not count:
            self.ended = self.ended or "closed its lane"
        self._in += memoryview(self._chunk)[:count]
        return count > 0

    def _cut(self) -> tuple[bytes, bytes | None] | None:
        if len(self._in) < HEADER.size:
            return None
        size, extra = HEADER.unpack_from(self._in)
        if max(size, extra) > self._most:  # where the next one begins is not known
            self.ended = f"sent a message of {size} bytes with {extra}: must be at most {self._most} each"
            self._in.clear()
            return None
        middle, end = HEADER.size + size, HEADER.size + size + extra
        if len(self._in) < end:
            return None
        found = bytes(self._in[HEADER.size : middle]), bytes(self._in[middle:end]) or None
        del self._in[:end]
        return found


def listen(path: Path) -> socket.socket:
    """A listener, not blocking, in the place of what a killed engine may have left there. ValueError if it has none."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
    except OSError as error:
        listener.close()
        raise ValueError(f"lane {path}: {error.strerror}") from None
    listener.setblocking(False)
    listener.listen(_BACKLOG)
    return listener


def connect(path: Path) -> Lane:
    """The other end. RuntimeError if nobody listens."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _CONNECT_TIMEOUT, 0))
    try:
        connected.connect(str(path))
    except OSError as error:
        connected.close()
        raise RuntimeError(f"no lane to the coordinator: {path}: {error.strerror}") from None
    return Lane(connected)


def peer(connected: socket.socket) -> int:
    """The process that has connected, as the kernel says."""
    pid, _, _ = _PEER.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(pid)
