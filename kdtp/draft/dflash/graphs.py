"""CUDA graphs of a network that drafts: a few layers are hundreds of launches, and a replay is one.

As model.graphs: fixed shapes, batches padded to one of a few, padding inert, ranks capture and run alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kdtp.draft.dflash.frames import Found, first
from kdtp.draft.dflash.network import Block, DFlash
from kdtp.log import logger
from kdtp.types import power

SHORTEST = 1024  # context rows of a draft; from here they double
FEWEST, MOST = 8, 512  # rows that are absorbed
MOST_SEQS = 32  # that are drafted for: padding costs memory, and launches matter less the more there are


@dataclass
class _Captured:
    """What a graph reads, what it leaves behind, and the call that it replays."""

    buffer: torch.Tensor
    found: Found | None
    graph: torch.cuda.CUDAGraph
    call: Callable[[], Found | None]


class Graphs:
    """Graphs of `network` by shape, captured when first needed or before; all share one pool of memory.

    draft: of what the network has gathered, on its device; features: those that are absorbed are read there. What
    `draft` gives stays until the next call.
    """

    def __init__(self, network: DFlash, draft: Callable[[torch.Tensor], Found], features: torch.Tensor) -> None:
        self._network, self._draft, self._features = network, draft, features
        self._stream = torch.cuda.Stream(network.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[tuple[int, ...], _Captured] = {}

    @torch.inference_mode()
    def draft(self, blocks: Sequence[Block]) -> Found:
        """What is found for each block."""
        shape = self.shape(blocks)
        found = self._replay(shape, self._network.gather(blocks, *shape))
        assert found is not None
        return first(found, len(blocks))

    def shape(self, blocks: Sequence[Block]) -> tuple[int, int]:
        """Sequences and context rows of the graph for these."""
        return power(len(blocks)), max(SHORTEST, power(self._network.reach(blocks)))

    @torch.inference_mode()
    def absorb(self, taken: Sequence[int], positions: Sequence[int], rows: Sequence[int]) -> bool:
        """As DFlash.absorb, of rows `taken` of the features; False if they are more than any graph is for."""
        if len(taken) > MOST:
            return False
        size = max(FEWEST, power(len(taken)))
        nothing = [0] * (size - len(taken))
        where = [*taken, *nothing], [*positions, *nothing], [*rows, *[self._network.sink] * len(nothing)]
        self._replay((size,), torch.tensor(where, pin_memory=self._network.device.type == "cuda"))
        return True

    def capture_usual(self, seqs: int) -> None:
        """For up to `seqs` sequences of short texts."""
        for i in range(power(min(seqs, MOST_SEQS)).bit_length()):
            self._capture((1 << i, SHORTEST))
        size = FEWEST
        while size <= MOST:
            self._capture((size,))
            size *= 2

    def _replay(self, shape: tuple[int, ...], values: torch.Tensor) -> Found | None:
        if shape not in self._captured:
            self._capture(shape)
        captured = self._captured[shape]
        captured.buffer.copy_(values, non_blocking=True)
        self._network.comm.note("replay of a drafter's graph", shape)
        captured.graph.replay()
        return captured.found

    @torch.inference_mode()
    def _capture(self, shape: tuple[int, ...]) -> None:
        """With inputs that change nothing: blocks without context, or rows that go nowhere."""
        if shape in self._captured:
            return
        began = time.perf_counter()
        buffer, call = self._drafting(*shape) if len(shape) == 2 else self._absorbing(*shape)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            call()  # what is loaded or set up on first use cannot be while capturing
        graph = torch.cuda.CUDAGraph()
        # Other threads may do as they like meanwhile: NCCL's watchdog does.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            found = call()
        self._captured[shape] = _Captured(buffer, found, graph, call)
        what = f"{shape[0]} sequences, context {shape[1]}" if len(shape) == 2 else f"{shape[0]} rows absorbed"
        logger.info("drafter's graph: %s: %.0f ms", what, 1000 * (time.perf_counter() - began))

    def _drafting(self, seqs: int, width: int) -> tuple[torch.Tensor, Callable[[], Found]]:
        empty = [Block(0, torch.empty(0, dtype=torch.int64))]
        buffer = self._network.gather(empty, seqs, width).to(self._network.device)
        return buffer, lambda: self._draft(buffer)

    def _absorbing(self, rows: int) -> tuple[torch.Tensor, Callable[[], None]]:
        where = torch.zeros(3, rows, dtype=torch.int64, device=self._network.device)
        where[2] = self._network.sink
        return where, lambda: self._network.absorb(self._features[where[0]], where[1], where[2])
