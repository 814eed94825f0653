"""Work beside other work: in a CUDA graph, kernels that do not need each other run at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
Ready = torch.cuda.Event | None  # after which a result is there; None: it is


def beside(x: torch.Tensor, work: Callable[[], T]) -> tuple[T, Ready]:
    """Let `work`, which reads x, run beside what is called next -> its result, and when that is there.

    The current stream must wait for that before x or the result go. Where no graph is captured on x's device `work` is
    done first: streams cost the host more time than they save.
    """
    if not x.is_cuda or not torch.cuda.is_current_stream_capturing():
        return work(), None
    stream = _stream(x.device)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        # Its memory is used again by the next such work only, which comes after what waits for this.
        return work(), stream.record_event()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
