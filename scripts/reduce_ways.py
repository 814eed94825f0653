"""Ways to sum M x 7168 bfloat16 over the ranks, each with its input, a call, and what must come out of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from kdtp.kernels import cuda
from kdtp.model.comm import Comm, sum_in_order
from kdtp.model.layers import Norm
from kdtp.model.push import MOST, Push

WIDTH = 7168
TOLERANCE = 2**-6  # of the largest element, for sums in another order and roundings in between


@dataclass(frozen=True)
class Way:
    """call: sums x over the ranks, and gives where the sum is, or its norm; x may be that place.

    residual: with a norm, what is added to before it. exact: the sum is that in rank order, bit for bit.
    """

    name: str
    x: torch.Tensor
    call: Callable[[], torch.Tensor]
    exact: bool = False
    residual: torch.Tensor | None = None


def pushed(comm: Push, rows: int, norm: Norm) -> Iterator[Way]:
    """kdtp's kernel."""
    if rows * WIDTH * 2 > MOST:
        return
    x, residual = empty(rows), torch.zeros_like(empty(rows))

    def separate() -> torch.Tensor:
        return cuda.rms_norm(comm.all_reduce(x), norm.weight, norm.eps, residual)

    def fused() -> torch.Tensor:
        return comm.all_reduce_norm(x, residual, norm)[1]

    yield Way("push", x, lambda: comm.all_reduce(x), exact=True)
    yield Way("push, norm", x, separate, exact=True, residual=residual)
    yield Way("push+norm", x, fused, exact=True, residual=residual)


def nccl(base: Comm, rows: int) -> Iterator[Way]:
    """NCCL's all_reduce, and its all_gather with a sum in rank order."""
    x, y = empty(rows), torch.zeros_like(empty(rows))

    def in_place() -> torch.Tensor:
        dist.all_reduce(y)
        return y

    yield Way("nccl", y, in_place)
    yield Way("gather", x, lambda: base.all_reduce(x), exact=True)


def symmetric(rows: int) -> Iterator[Way]:
    """torch's symmetric memory, without multicast."""
    import torch.distributed._symmetric_memory as symmetric_memory

    group = dist.group.WORLD
    assert group is not None
    name, ops = group.group_name, torch.ops.symm_mem
    device = torch.device("cuda", torch.cuda.current_device())
    x, y = (symmetric_memory.empty(rows, WIDTH, dtype=torch.bfloat16, device=device).zero_() for _ in range(2))
    for tensor in (x, y):
        symmetric_memory.rendezvous(tensor, group)

    def in_place() -> torch.Tensor:
        ops.two_shot_all_reduce_(y, "sum", name)
        return y

    yield Way("1-shot", x, lambda: ops.one_shot_all_reduce(x, "sum", name))
    yield Way("2-shot", y, in_place)


def empty(rows: int) -> torch.Tensor:
    """Room for a message."""
    return torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda")


def capture(way: Way, calls: int) -> torch.cuda.CUDAGraph:
    """A graph of so many calls."""
    way.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(calls):
            way.call()
    return graph


def wrong(way: Way, comm: Comm, norm: Norm, times: int) -> int:
    """How many of so many replays of a graph gave something else, each on new data; ranks are late in turn."""
    way.call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        out = way.call()
    bad = 0
    for seed in range(times):
        generator = torch.Generator("cuda").manual_seed(seed)
        parts = torch.randn(comm.size, *way.x.shape, generator=generator, device="cuda").to(way.x.dtype)
        want, before = sum_in_order(parts), torch.ones_like(way.x)
        if way.residual is not None:
            way.residual.copy_(before)
            want = cuda.rms_norm(want, norm.weight, norm.eps, before)
        way.x.copy_(parts[comm.rank])
        torch.cuda._sleep(200_000 if seed % comm.size == comm.rank else 0)
        graph.replay()
        bad += not _alike(out, want, way.exact)
    return bad


def _alike(found: torch.Tensor, want: torch.Tensor, exact: bool) -> bool:
    if exact:
        return torch.equal(found.view(torch.int16), want.view(torch.int16))
    return bool((found.float() - want.float()).abs().max() <= TOLERANCE * want.float().abs().max())
