"""A worker whose sums go one way, or that parts from the others: python -m tests.odd_rank WAY ERROR AT [--run-dir ...]

WAY: probe (as ever), push (up to push.MOST), base (never pushed; gloo on a CPU). ERROR, on rank 1, at its AT-th sum
that goes with a norm: skip makes no collective there; extra makes it twice; narrow sums half of it; turned sums the
same bytes as another shape, which no backend notices; none.
"""

from __future__ import annotations

import os
import sys
from functools import partial

import torch

from kdtp.engine import guard, worker
from kdtp.model import push
from kdtp.model.comm import Comm
from kdtp.model.layers import Norm

connect_by_probe = push.connect


def connect(base: Comm, timeout: float, way: str) -> Comm:
    """In the place of push.connect; no probe."""
    return base if way == "base" else connect_by_probe(base, timeout, push.MOST)


class Odd:
    """Errs once, in the place of a Comm's all_reduce_norm."""

    def __init__(self, comm: Comm, error: str, at: int) -> None:
        self._comm, self._right, self._error, self._left = comm, comm.all_reduce_norm, error, at

    def __call__(self, x: torch.Tensor, residual: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        self._left -= 1
        if self._left != 0:
            return self._right(x, residual, norm)
        print(f"rank {self._comm.rank} errs: {self._error}", file=sys.stderr, flush=True)
        if self._error == "skip":
            return norm.add(x, residual)
        if self._error == "turned":
            return norm.add(self._comm.all_reduce(x.view(x.shape[::-1])).view(x.shape), residual)
        if self._error == "narrow":
            half = x.shape[1] // 2
            return norm.add(torch.cat([self._comm.all_reduce(x[:, :half].contiguous()), x[:, half:]], 1), residual)
        self._comm.all_reduce(x)
        return self._right(x, residual, norm)


def main() -> int:
    """Run the worker."""
    way, error, at, *rest = sys.argv[1:]
    if way != "probe":
        push.connect = partial(connect, way=way)  # type: ignore[assignment]
    load = worker.Shard.load

    def load_odd(path: str, comm: Comm, *others: object) -> worker.Shard:
        if comm.rank == 1 and error != "none":
            comm.all_reduce_norm = Odd(comm, error, int(at))  # type: ignore[method-assign]
        return load(path, comm, *others)  # type: ignore[arg-type]

    worker.Shard.load = load_odd  # type: ignore[method-assign,assignment]
    return worker.main(rest)


if __name__ == "__main__":
    guard.end_with_parent(os.getppid())
    guard.dump_stacks_on_signal()
    guard.leave(main())
