"""CUDA graphs of a draft: a network of a few layers is hundreds of launches, and a replay is one.

As model.graphs: fixed shapes, batches padded to one of a few, padding inert, ranks capture and run alike.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from kdtp.draft.dflash.network import Asked, Block, DFlash, Drafted
from kdtp.log import logger

SHORTEST = 1024  # context rows; from here they double


class _Shape(NamedTuple):
    """Sequences, and context rows of each."""

    seqs: int
    width: int


class Graphs:
    """A graph of `network` for each shape, captured when it is first needed or before; all share one pool of memory.

    What `run` gives stays until the next run.
    """

    def __init__(self, network: DFlash, topk: int) -> None:
        self._network, self._topk = network, topk
        self._stream = torch.cuda.Stream(network.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[_Shape, tuple[Asked, Drafted, torch.cuda.CUDAGraph]] = {}

    @torch.inference_mode()
    def run(self, blocks: Sequence[Block]) -> Drafted:
        """Candidates for each block."""
        longest = max(len(block.rows) for block in blocks)
        shape = _Shape(_power(len(blocks)), max(SHORTEST, _power(longest)))
        if shape not in self._captured:
            self._capture(shape)
        inputs, found, graph = self._captured[shape]
        for buffer, values in zip(inputs, self._network.gather(blocks, *shape), strict=True):
            buffer.copy_(values, non_blocking=True)
        self._network.comm.note("replay of a draft", shape)
        graph.replay()
        return Drafted(found.lp[: len(blocks)], found.ids[: len(blocks)])

    def capture_usual(self, seqs: int) -> None:
        """For up to `seqs` sequences of short texts."""
        for i in range(_power(seqs).bit_length()):
            self._capture(_Shape(1 << i, SHORTEST))

    @torch.inference_mode()
    def _capture(self, shape: _Shape) -> None:
        """On blocks that have no context."""
        began = time.perf_counter()
        network = self._network
        empty = [Block(0, torch.empty(0, dtype=torch.int64))]
        inputs = Asked(*(values.to(network.device) for values in network.gather(empty, *shape)))
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            network.forward(inputs, self._topk)  # what is loaded or set up on first use cannot be while capturing
        graph = torch.cuda.CUDAGraph()
        # Other threads may do as they like meanwhile: NCCL's watchdog does.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            found = network.forward(inputs, self._topk)
        self._captured[shape] = inputs, found, graph
        spent = 1000 * (time.perf_counter() - began)
        logger.info("draft graph: %d sequences, context %d: %.0f ms", shape.seqs, shape.width, spent)


def _power(least: int) -> int:
    """The first power of two from `least` on."""
    return 1 << max(least - 1, 0).bit_length()
