"""CUDA graphs of the forward: a launch costs the host more than many a kernel takes, and a replay launches them all.

A graph has fixed shapes, so batches are padded to one of a few. Padding is inert: it writes no KV row, sees none and
asks no expert. A row's bits do not depend on the others, so a graph gives what the same kernels give one by one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from kdtp.log import logger
from kdtp.model.indices import Shape, padding, path_rows
from kdtp.types import GRAPH_ROWS, PAGE_ROWS, SeqRows, power

ROWS = GRAPH_ROWS
PROMPTS = 128  # rows of the largest graph for prompts alone: they differ, and capturing costs more than it saves
DEEP = 32  # rows of a path, but for the few trees that are deeper: all paths of 512 rows are a megabyte to copy
SHORTEST = 1024  # positions; contexts double from here, as the attention's grid grows with what is possible
# Index buffer on the device -> logits [R, n], and of each row the id that is best on all ranks, int64 [R].
Forward = Callable[[torch.Tensor, Shape], tuple[torch.Tensor, torch.Tensor]]


def bucket(seqs: Sequence[SeqRows]) -> Shape | None:
    """The shape whose graph runs a batch; None for one without: too many rows, or none to choose a token at."""
    rows = sum(len(seq.tokens) for seq in seqs)
    decoding = any(seq.pick == len(seq.tokens) for seq in seqs)
    if rows > (ROWS[-1] if decoding else PROMPTS) or not any(seq.pick for seq in seqs):
        return None
    deep = path_rows([seq for seq in seqs if len(seq.tokens) > DEEP]) > DEEP
    return padded(rows, len(seqs), max(seq.start for seq in seqs), deep)


def padded(rows: int, seqs: int, start: int, deep: bool = False) -> Shape:
    """The smallest shape for at most ROWS[-1] rows of so many sequences, the longest of `start` committed rows; deep:
    there is a tree with a path of more than DEEP rows."""
    m = next(size for size in ROWS if size >= rows)
    context = max(SHORTEST, power(start))
    pages = -(-(context + m) // PAGE_ROWS)
    depth = m if deep else min(m, DEEP)
    return Shape(rows=m, seqs=power(seqs), depth=depth, pages=pages, picked=m, max_start=context)


def usual(seqs: int, nodes: int) -> list[Shape]:
    """What up to `seqs` short sequences need: plain decoding, and trees of `nodes` nodes for all."""
    counts = {min(1 << i, seqs) for i in range(power(seqs).bit_length())}
    sizes = {(count * each, count) for count in counts for each in (1, nodes)}
    return sorted({padded(rows, count, 0) for rows, count in sizes if rows <= ROWS[-1]}, key=lambda s: (s.rows, s.seqs))


class Graphs:
    """A graph of a forward for each shape, captured when it is first needed or before; all share one pool of memory.

    out [ROWS[-1], n]: where they leave the logits. Ranks must capture and run alike: collectives are part of a graph.
    The forward is given to every call and not kept: a shard that is part of a cycle would keep its weights for long.
    """

    def __init__(self, out: torch.Tensor) -> None:
        self._out = out
        self._ids = torch.zeros(len(out), dtype=torch.int64, device=out.device)
        self._stream = torch.cuda.Stream(out.device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[Shape, tuple[torch.Tensor, torch.cuda.CUDAGraph]] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def run(self, forward: Forward, shape: Shape, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [R, n] and best ids [R] of a batch planned in that shape (pinned host memory); they stay until the
        next run."""
        if shape not in self._captured:
            self.capture(forward, shape)
        buffer, graph = self._captured[shape]
        # The copy ends on its own time; torch gives pinned memory to nobody else before that.
        buffer.copy_(indices, non_blocking=True)
        graph.replay()
        return self._out[: shape.picked], self._ids[: shape.picked]

    def capture(self, forward: Forward, shape: Shape) -> None:
        """Capture the graph of a shape, on a batch of mere padding."""
        began = time.perf_counter()
        buffer = padding(shape).to(self._out.device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            forward(buffer, shape)  # what is loaded or set up on first use cannot be while capturing
        graph = torch.cuda.CUDAGraph()
        # Other threads may do as they like meanwhile: NCCL's watchdog does.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            self._out[: shape.picked], self._ids[: shape.picked] = forward(buffer, shape)
        self._captured[shape] = buffer, graph
        spent = 1000 * (time.perf_counter() - began)
        logger.info(
            "graph %d: %d rows, %d sequences, context %d: %.0f ms",
            len(self), shape.rows, shape.seqs, shape.max_start, spent,
        )  # fmt: skip
