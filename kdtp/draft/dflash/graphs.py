"""CUDA graphs of a network that drafts: a few layers are hundreds of launches, and a replay is one.

As model.graphs: fixed shapes, batches padded to one of a few, padding inert, ranks capture and run alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kdtp.draft.dflash.frames import Found, draft
from kdtp.draft.dflash.network import Block, DFlash, Drafted
from kdtp.log import logger
from kdtp.types import power

SHORTEST = 1024  # context rows of a draft; from here they double
FEWEST, MOST = 8, 512  # rows that are absorbed
MOST_SEQS = 32  # that are drafted for: padding costs memory, and launches matter less the more there are


class _Drafting(NamedTuple):
    """Sequences, context rows, and the trees that are grown, as in frames.draft."""

    seqs: int
    width: int
    shape: str
    nodes: int


class _Absorbing(NamedTuple):
    """Rows that are absorbed."""

    rows: int


@dataclass
class _Captured:
    """What a graph reads, and what it leaves behind."""

    buffer: torch.Tensor
    found: Found | None
    graph: torch.cuda.CUDAGraph


class Graphs:
    """Graphs of `network` by shape, captured when first needed or before; all share one pool of memory.

    features: those that are absorbed are read there. What `draft` gives stays until the next call.
    """

    def __init__(self, network: DFlash, topk: int, features: torch.Tensor) -> None:
        self._network, self._topk, self._features = network, topk, features
        self._stream = torch.cuda.Stream(network.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[_Drafting | _Absorbing, _Captured] = {}

    @torch.inference_mode()
    def draft(self, blocks: Sequence[Block], shape: str = "", nodes: int = 0) -> Found:
        """What is found for each block, as by frames.draft."""
        kind = _Drafting(power(len(blocks)), max(SHORTEST, power(self._network.reach(blocks))), shape, nodes)
        found = self._replay(kind, self._network.gather(blocks, kind.seqs, kind.width))
        assert found is not None
        count = len(blocks)
        return Drafted(found.lp[:count], found.ids[:count]) if isinstance(found, Drafted) else found[:count]

    @torch.inference_mode()
    def absorb(self, taken: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> bool:
        """As DFlash.absorb, of rows `taken` of the features; False if they are more than any graph is for."""
        if len(taken) > MOST:
            return False
        size = max(FEWEST, power(len(taken)))
        nothing = [0] * (size - len(taken))
        where = [*taken, *nothing], [*positions, *nothing], [*rows, *[self._network.sink] * len(nothing)]
        self._replay(_Absorbing(size), torch.tensor(where, pin_memory=self._network.device.type == "cuda"))
        return True

    def capture_usual(self, seqs: int, shape: str = "", nodes: int = 0) -> None:
        """For up to `seqs` sequences of short texts."""
        for i in range(power(min(seqs, MOST_SEQS)).bit_length()):
            self._capture(_Drafting(1 << i, SHORTEST, shape, nodes))
        size = FEWEST
        while size <= MOST:
            self._capture(_Absorbing(size))
            size *= 2

    def _replay(self, kind: _Drafting | _Absorbing, values: torch.Tensor) -> Found | None:
        if kind not in self._captured:
            self._capture(kind)
        captured = self._captured[kind]
        captured.buffer.copy_(values, non_blocking=True)
        self._network.comm.note("replay of a drafter's graph", kind)
        captured.graph.replay()
        return captured.found

    @torch.inference_mode()
    def _capture(self, kind: _Drafting | _Absorbing) -> None:
        """With inputs that change nothing: blocks without context, or rows that go nowhere."""
        if kind in self._captured:
            return
        began = time.perf_counter()
        buffer, call = self._drafting(kind) if isinstance(kind, _Drafting) else self._absorbing(kind.rows)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()  # what is loaded or set up on first use cannot be while capturing
        graph = torch.cuda.CUDAGraph()
        # Other threads may do as they like meanwhile: NCCL's watchdog does.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            found = call()
        self._captured[kind] = _Captured(buffer, found, graph)
        logger.info("drafter's graph %s: %.0f ms", kind, 1000 * (time.perf_counter() - began))

    def _drafting(self, kind: _Drafting) -> tuple[torch.Tensor, Callable[[], Found]]:
        empty = [Block(0, torch.empty(0, dtype=torch.int64))]
        buffer = self._network.gather(empty, kind.seqs, kind.width).to(self._network.device)
        return buffer, lambda: draft(self._network, buffer, self._topk, kind.shape, kind.nodes)

    def _absorbing(self, rows: int) -> tuple[torch.Tensor, Callable[[], None]]:
        where = torch.zeros(3, rows, dtype=torch.int64, device=self._network.device)
        where[2] = self._network.sink
        return where, lambda: self._network.absorb(self._features[where[0]], where[1], where[2])
