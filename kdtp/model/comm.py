"""Collectives between the ranks of a model: an object handed to constructors, the same calls for one rank or many."""

from __future__ import annotations

import zlib
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from kdtp.model.layers import Norm


class Comm(Protocol):
    """The ranks that share one model. Every rank calls the same collectives in the same order with equal shapes.

    made: a checksum of the calls so far. No backend finds out by itself that ranks have parted: a collective that one
    of them skips is paired with the next one, and what comes of it looks like a sum.
    """

    rank: int
    size: int
    made: int = 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of x over the ranks: added in rank order, so equal on all of them, bit for bit."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x of every rank, [size, *x.shape]."""
        ...

    def all_reduce_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """The new residual, which is residual + all_reduce(x), and its norm; [M, H] each. On a GPU it is in place."""
        return norm.add(self.all_reduce(x), residual)

    def note(self, *what: object) -> None:
        """Count a call in `made`, or a replay of many: what it is, by values whose repr is the same on all ranks."""
        self.made = zlib.crc32(repr(what).encode(), self.made)

    def check(self) -> None:
        """Raise RuntimeError if a collective has failed that could not say so itself: nothing since is of any worth.

        Only those that the device has ended are known of.
        """
        return


class Solo(Comm):
    """One rank."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """x itself."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """x, with a leading dimension of 1."""
        return x[None]


class Gloo(Comm):
    """CPU processes over torch.distributed's gloo, in its default group, which must be initialised.

    A peer that is gone or late raises RuntimeError.
    """

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """As Comm."""
        return sum_in_order(self.all_gather(x))

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As Comm. x: a CPU tensor; NotImplementedError for another."""
        if x.device.type != "cpu":
            raise NotImplementedError(f"gloo: a tensor on {x.device}: only CPU tensors")
        self.note("gather", *x.shape, x.dtype)
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype)
        if x.numel():
            dist.all_gather(list(parts.unbind()), x.contiguous())
        return parts


class Nccl(Gloo):
    """GPUs over torch.distributed's NCCL, in its default group, which must be initialised."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """As Comm."""
        self.note("gather", *x.shape, x.dtype)
        parts = torch.empty(self.size, *x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            dist.all_gather_into_tensor(parts.view(-1), x.contiguous().view(-1))
        return parts


def sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """The sum of parts [size, ...], first to last, in float32 for bfloat16: never in an order of gloo's own."""
    total = parts[0] if parts.dtype != torch.bfloat16 else parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total.to(parts.dtype)


def connect(device: str, rank: int, size: int, timeout: float) -> Comm:
    """Join the ranks of a model; every rank calls this once. timeout: seconds for this and each later collective.

    Finds the others by MASTER_ADDR and MASTER_PORT, which the launcher and torchrun set. Raises RuntimeError
    (torch's DistStoreError or DistNetworkError) when they do not come.
    """
    if size == 1:
        return Solo()
    from kdtp.model import push  # which has a Comm of its own

    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))
    return Gloo() if device == "cpu" else push.connect(Nccl(), timeout)
