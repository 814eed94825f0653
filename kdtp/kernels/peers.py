"""The one-shot all-reduce of kdtp_all_reduce: rooms that the GPUs of one machine map of each other, and calls in them.

Nothing here talks to the other ranks: what they must know of each other is exchanged by who makes the rooms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtp.kernels.abi import DTYPES, Fields, KernelError, library

MOST_RANKS = 8
BLOCKS = 256  # most blocks of a call; as many stamps of 16 bytes lie in front of a part
STAMPS = 16 * BLOCKS
NORMED = 8192  # widest row that is normed in the same kernel
HANDLE = 64  # bytes
_LATE, _UNLIKE = 1, 2


def room_bytes(size: int, most: int) -> int:
    """Bytes of a room for `size` ranks and messages of up to `most` bytes, a multiple of 16."""
    return 2 * size * (STAMPS + most)


def make_room(size: int, most: int, device: int) -> tuple[int, torch.Tensor]:
    """A room on a GPU -> its address, and the handle, uint8 [HANDLE], by which other processes open it."""
    room, handle = torch.zeros(1, dtype=torch.int64), torch.zeros(HANDLE, dtype=torch.uint8)
    library().prepare("room_make", room_bytes(size, most), device, room.data_ptr(), handle.data_ptr())
    return int(room.item()), handle


def open_room(handle: torch.Tensor, device: int) -> int:
    """The address here of another process's room. Raises KernelError where `device` cannot reach it."""
    room, handle = torch.zeros(1, dtype=torch.int64), handle.contiguous()
    library().prepare("room_open", handle.data_ptr(), device, room.data_ptr())
    return int(room.item())


def close_room(room: int, device: int, own: bool) -> None:
    """Give back a room that was made (own) or opened here."""
    library().prepare("room_close", room, device, int(own))


def fits(x: torch.Tensor, most: int) -> bool:
    """Whether the kernel can sum x, by its shape and type: whole packs of 16 bytes, `most` bytes at most."""
    return x.dtype in DTYPES and 0 < x.nbytes <= most and x.nbytes % 16 == 0


def normed(x: torch.Tensor) -> bool:
    """Whether it can norm the sum of x [M, H] too."""
    return x.shape[1] <= NORMED and x.shape[1] * x.itemsize % 16 == 0


class Peers:
    """The calls of one rank. rooms: of each rank, as this one sees them; most: bytes of the largest message.

    blocks: at most the multiprocessors of any rank's GPU; timeout: seconds to wait for a rank. All ranks make the same
    calls in the same order, each in one stream at a time.
    """

    def __init__(
        self, rank: int, rooms: Sequence[int], most: int, blocks: int, timeout: float, device: torch.device
    ) -> None:
        self.most = most
        self._state = torch.zeros(BLOCKS + 1, dtype=torch.int32, device=device)
        self._failure = torch.zeros(8, dtype=torch.int32, pin_memory=True)
        self._calls = 0
        self._fixed: Fields = {f"room{i}": room for i, room in enumerate(rooms)} | {
            "state": self._state,
            "failure": self._failure,
            "rank": rank,
            "size": len(rooms),
            "part_bytes": STAMPS + most,
            "blocks": min(blocks, BLOCKS),
            "timeout_ns": int(1e9 * timeout),
        }

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks, in rank order and float32; x of any shape that `fits`."""
        out = torch.empty_like(x)
        self._run(x.view(1, -1), out, {})
        return out

    def all_reduce_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """As all_reduce, then kernels.cuda.rms_norm with `residual` [M, H], which is added to in place."""
        if (residual.shape, residual.dtype, residual.is_contiguous()) != (x.shape, x.dtype, True):
            found = f"residual {list(residual.shape)} {residual.dtype}"
            raise KernelError(f"all_reduce: {found}: must be {list(x.shape)} {x.dtype}, contiguous")
        out = torch.empty_like(x)
        self._run(x, out, {"residual": residual, "weight": weight, "eps": eps})
        return out

    def wait_for(self, seconds: float) -> None:
        """From now on, so long for a rank."""
        self._fixed["timeout_ns"] = int(1e9 * seconds)

    def failure(self) -> str | None:
        """How the first call has failed that did, of those that the device has ended; none can be trusted then."""
        how, rank, stamp, other, rows, width = self._failure.tolist()[:6]
        if how == _LATE:
            seconds = self._fixed["timeout_ns"] / 1e9
            return f"all-reduce {stamp}: nothing from rank {rank} within {seconds:g} s"
        if how == _UNLIKE:
            return f"all-reduce {stamp}: rank {rank} was in all-reduce {other} of [{rows}, {width}]"
        return None

    def _run(self, x: torch.Tensor, out: torch.Tensor, norm: Fields) -> None:
        # A stamp is the number of the call as Python made it: in a graph, of the call that was captured.
        self._calls = (self._calls + 1) % 2**31
        shape: Fields = {"rows": x.shape[0], "width": x.shape[1], "dtype": DTYPES[x.dtype], "stamp": self._calls}
        stream = torch.cuda.current_stream().cuda_stream
        library().call("all_reduce", stream, **self._fixed, x=x, out=out, **norm, **shape)
