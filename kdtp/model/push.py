"""All-reduce for the GPUs of one machine: small messages are pushed into each other's memory, others go another way.

Which way a message goes depends on its shape and on figures that all ranks have exchanged: they always choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kdtp.kernels import peers
from kdtp.kernels.abi import KernelError
from kdtp.kernels.peers import Peers
from kdtp.log import logger
from kdtp.model.comm import Comm
from kdtp.model.layers import Norm

MOST = 2 << 20  # bytes of the largest message that is pushed: one-shot traffic grows with the ranks
SIZES = tuple(1 << i for i in range(13, 22))  # bytes of the messages that the probe times
MOST_GATHERED = 1 << 16  # bytes of all ranks that are gathered by a sum
_CALLS = 16  # in a graph of the probe
_PROOF_TIMEOUT = 10.0  # seconds to wait for the first pushed words: they come, or there is no way for them
Rooms = list[int]  # addresses here of every rank's room


class Push(Comm):
    """Pushes messages of up to `most` bytes; `base` carries the others. Both give the same bits.

    A little float32, such as the best logit of every rank, is gathered by a sum with zeros: there -0.0 comes as 0.0.
    """

    def __init__(self, base: Comm, rooms: Rooms, mapped: Peers, most: int) -> None:
        self.rank, self.size = base.rank, base.size
        self.most = most
        self._base, self._rooms, self._peers = base, rooms, mapped

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As Comm."""
        self.note("sum", *x.shape, x.dtype)
        return self._peers.all_reduce(x.contiguous()) if peers.fits(x, self.most) else self._base.all_reduce(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As Comm."""
        self.note("gather", *x.shape, x.dtype)
        if x.dtype != torch.float32 or not peers.fits(x, MOST_GATHERED // self.size):
            return self._base.all_gather(x)
        parts = x.new_zeros(self.size, *x.shape)
        parts[self.rank] = x
        return self.all_reduce(parts)

    def all_reduce_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """As Comm; in one kernel where the message is pushed."""
        if peers.fits(x, self.most) and peers.normed(x):
            self.note("sum, norm", *x.shape, x.dtype)
            return residual, self._peers.all_reduce_norm(x.contiguous(), residual, norm.weight, norm.eps)
        return norm.add(self.all_reduce(x), residual)

    def check(self) -> None:
        """As Comm."""
        if text := self._peers.failure():
            raise RuntimeError(text)

    def up_to(self, most: int) -> Push:
        """The same rooms and calls, but with messages of up to `most` bytes pushed."""
        return Push(self._base, self._rooms, self._peers, most)

    def close(self) -> None:
        """Give the rooms back; a collective call. Processes that end need not."""
        torch.cuda.synchronize()
        _close(self._base, self._rooms)


def connect(base: Comm, timeout: float, most: int | None = None) -> Comm:
    """`base`, with small messages pushed where all GPUs can map each other's memory and it is faster; else `base`.

    A collective call, on each rank's current GPU. timeout: seconds to wait for a rank in later calls; most: bytes up to
    which to push, up to MOST, instead of what a probe finds.
    """
    if base.size > peers.MOST_RANKS:
        logger.warning("all-reduce: not by push: %d ranks, at most %d can", base.size, peers.MOST_RANKS)
        return base
    rooms, processors = _map(base)
    if not rooms:
        return base
    device = torch.device("cuda", torch.cuda.current_device())
    mapped = Peers(base.rank, rooms, MOST, processors, _PROOF_TIMEOUT, device)
    if broken := _unproved(base, mapped):
        logger.warning("all-reduce: not by push: wrong sums on ranks %s", broken)
        _close(base, rooms)
        return base
    mapped.wait_for(timeout)
    chosen = _probe(base, mapped) if most is None else most
    logger.info("all-reduce: by push up to %d KiB", chosen >> 10)
    return Push(base, rooms, mapped, chosen)


def crossover(sizes: Sequence[int], push: Sequence[float], other: Sequence[float]) -> int:
    """The largest of the ascending sizes up to which all are pushed in less time; 0 if the first is not."""
    best = 0
    for size, ours, theirs in zip(sizes, push, other, strict=True):
        if ours >= theirs:
            break
        best = size
    return best


def unmapped(opened: torch.Tensor) -> list[str]:
    """Which rank cannot map whose memory, of what each has opened: bool [size, size], rank by owner."""
    return [f"rank {rank} cannot map the memory of rank {owner}" for rank, owner in (~opened).nonzero().tolist()]


def _map(base: Comm) -> tuple[Rooms, int]:
    """Every rank's room as this one sees it, none unless all ranks see all; multiprocessors of the smallest GPU."""
    own, handle = _make(base.size)
    count = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    cards = _gather(base, torch.cat([handle.long(), torch.tensor([count, int(own != 0)])]))
    handles, smallest = cards[:, : peers.HANDLE].to(torch.uint8), int(cards[:, peers.HANDLE].min())
    made = cards[:, peers.HANDLE + 1].bool().tolist()
    rooms = [own if i == base.rank else _open(i, handles[i]) if made[i] else 0 for i in range(base.size)]
    missing = unmapped(_gather(base, torch.tensor([room != 0 for room in rooms]).long()).bool())
    if not missing:
        return rooms, smallest
    logger.warning("all-reduce: not by push: %s", "; ".join(missing))
    _close(base, rooms)
    return [], smallest


def _make(size: int) -> tuple[int, torch.Tensor]:
    try:
        return peers.make_room(size, MOST, torch.cuda.current_device())
    except KernelError as error:
        logger.warning("all-reduce: no memory that others can map: %s", error)
        return 0, torch.zeros(peers.HANDLE, dtype=torch.uint8)


def _open(owner: int, handle: torch.Tensor) -> int:
    try:
        return peers.open_room(handle, torch.cuda.current_device())
    except KernelError as error:
        logger.warning("all-reduce: the memory of rank %d: %s", owner, error)
        return 0


def _close(base: Comm, rooms: Rooms) -> None:
    for rank, room in enumerate(rooms):
        if room and rank != base.rank:
            peers.close_room(room, torch.cuda.current_device(), own=False)
    _gather(base, torch.zeros(1))  # nobody has it open any more
    if rooms[base.rank]:
        peers.close_room(rooms[base.rank], torch.cuda.current_device(), own=True)


def _gather(base: Comm, x: torch.Tensor) -> torch.Tensor:
    """A small CPU tensor of every rank, on the CPU."""
    return base.all_gather(x.cuda()).cpu()


def _unproved(base: Comm, mapped: Peers) -> list[int]:
    """The ranks on which a pushed sum is not the sum, if there are any: mapped memory need not be reachable."""
    generator = torch.Generator().manual_seed(base.rank)
    right = True
    for dtype in (torch.float32, torch.bfloat16):
        for size in (SIZES[0], MOST):
            x = torch.randn(size // dtype.itemsize, generator=generator).to(dtype).cuda()
            right &= torch.equal(mapped.all_reduce(x), base.all_reduce(x))
    right &= mapped.failure() is None
    return (_gather(base, torch.tensor([int(right)])) == 0).nonzero()[:, 0].tolist()


def _probe(base: Comm, mapped: Peers) -> int:
    """The size up to which pushing is faster, in graphs, on the rank where it takes longest."""
    messages = [torch.zeros(size // 2, dtype=torch.bfloat16, device="cuda") for size in SIZES]
    times = [[_microseconds(way, x) for x in messages] for way in (mapped.all_reduce, base.all_reduce)]
    push, other = _gather(base, torch.tensor(times)).amax(0).tolist()
    figures = zip(SIZES, push, other, strict=True)
    text = ", ".join(f"{size >> 10} KiB {ours:.1f} / {theirs:.1f}" for size, ours, theirs in figures)
    logger.info("all-reduce, us by push / by gather and sum: %s", text)
    return crossover(SIZES, push, other)


def _microseconds(call: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> float:
    """Of a call in a graph of many."""
    call(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(_CALLS):
            call(x)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    best = float("inf")
    for _ in range(3):
        before.record()
        graph.replay()
        after.record()
        after.synchronize()
        best = min(best, 1e3 * before.elapsed_time(after) / _CALLS)
    return best
