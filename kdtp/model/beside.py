"""Work beside other work: in a CUDA graph, two rows of small kernels that do not need each other run at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")


def beside(x: torch.Tensor, work: Callable[[], T]) -> Callable[[], T]:
    """Start `work`, which reads x, beside what is called next -> what gives its result, to be called before anything
    that `work` reads may go.

    Where no graph is being captured on x's device `work` is done when this returns: streams cost the host more time
    than they save.
    """
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        made = work()
        return lambda: made
    here, there = torch.cuda.current_stream(x.device), _stream(x.device)
    there.wait_stream(here)
    with torch.cuda.stream(there):
        made = work()

    def joined() -> T:
        # Memory of `there` is used again by work that waits for what follows here: nobody is in its way.
        here.wait_stream(there)
        return made

    return joined


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
