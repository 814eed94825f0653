"""The ways to build draft trees that bench_tree.py compares, and the memory that they share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

import numpy as np
import torch

from kdtp.kernels import abi
from kdtp.proposals import Marginals
from kdtp.spec import tree
from kdtp.types import ROOT

START = 1000  # position of every root
IN_GRAPH = 20  # builds in one graph
Lists = tuple[list[int], list[int]]  # tokens and parents of one tree
Build = Callable[[np.ndarray, np.ndarray, int, int], Lists]  # of lp and ids [L, K], root, budget


@dataclass(frozen=True)
class Case:
    """What is built. length: depths of the drafter (L); budget: nodes below the root."""

    length: int
    seqs: int
    budget: int

    @property
    def width(self) -> int:
        """Candidates per depth (K)."""
        return min(64, self.budget)

    @property
    def layout(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """The arrays of a build, dtype and shape by name."""
        seqs, nodes = self.seqs, 1 + self.budget
        grid = (seqs, self.length, self.width)
        return {
            "lp": (torch.float32, grid),
            "ids": (torch.int64, grid),
            "roots": (torch.int64, (seqs,)),
            "budgets": (torch.int32, (seqs,)),
            "depths": (torch.int32, (seqs,)),
            "starts": (torch.int32, (seqs,)),
            "parents": (torch.int32, (seqs, nodes)),
            "scores": (torch.float32, (seqs, nodes)),
            "counts": (torch.int32, (seqs,)),
            "tokens": (torch.int64, (seqs, nodes)),
            "positions": (torch.int32, (seqs, nodes)),
            "ancestors": (torch.int64, (seqs, nodes, -(-nodes // 64))),
        }


CANDIDATES, LIMITS = ("lp", "ids"), ("roots", "budgets", "depths", "starts")
KNOWN, WANTED = ("parents", "scores", "counts", "tokens"), ("tokens", "positions", "ancestors")


class Block:
    """Arrays that follow each other in memory, on GPU and (pinned) host alike, so that one copy moves several.

    On the CPU, for a dry run, both are host memory.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        ends = list(itertools.accumulate(self._bytes(*spec) for spec in case.layout.values()))
        self._spans = dict(zip(case.layout, zip([0, *ends], ends, strict=False), strict=True))
        self._host = torch.zeros(ends[-1], dtype=torch.uint8, pin_memory=self._on_gpu)
        self._device = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
        self.host = {name: self._view(self._host, name, *spec).numpy() for name, spec in case.layout.items()}
        self.device = {name: self._view(self._device, name, *spec) for name, spec in case.layout.items()}

    @staticmethod
    def _bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
        return -(-int(np.prod(shape)) * dtype.itemsize // 16) * 16

    def _view(self, data: torch.Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        first = self._spans[name][0]
        return data[first : first + int(np.prod(shape)) * dtype.itemsize].view(dtype).view(shape)

    @property
    def stream(self) -> int:
        """The stream that copies and kernels run on."""
        return torch.cuda.current_stream().cuda_stream if self._on_gpu else 0

    def wait(self) -> None:
        """Until what was begun is done."""
        if self._on_gpu:
            torch.cuda.current_stream().synchronize()

    def upload(self, names: Sequence[str]) -> None:
        """Copy these arrays, which are neighbours, to the GPU; not waited for."""
        span = slice(self._spans[names[0]][0], self._spans[names[-1]][1])
        self._device[span].copy_(self._host[span], non_blocking=True)

    def download(self, names: Sequence[str]) -> None:
        """Copy these arrays, which are neighbours, to the host; waited for."""
        span = slice(self._spans[names[0]][0], self._spans[names[-1]][1])
        self._host[span].copy_(self._device[span], non_blocking=True)
        self.wait()


class OnGpu:
    """The way of csrc/, with the struct made once."""

    def __init__(self, case: Case, block: Block) -> None:
        self._block = block
        self._arguments = self._struct(case)
        self._case = case

    def _struct(self, case: Case) -> Any:
        sizes = {"seqs": case.seqs, "depth": case.length, "before": 1, "k": case.width, "max_nodes": 1 + case.budget}
        stream = self._block.stream
        return abi.library().arguments("tree_build", stream=stream, **sizes, **self._block.device)

    def run(self) -> list[Lists]:
        """Build."""
        self._block.upload(LIMITS)
        abi.library().launch("tree_build", self._arguments)
        self._block.download(KNOWN)
        host = self._block.host
        counts = host["counts"].tolist()
        return [(host["tokens"][b, :n].tolist(), host["parents"][b, :n].tolist()) for b, n in enumerate(counts)]

    def kernel(self, times: int) -> list[float]:
        """Microseconds of one build on the GPU."""
        self._block.upload(LIMITS)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            arguments = self._struct(self._case)
            for _ in range(IN_GRAPH):
                abi.library().launch("tree_build", arguments)
        started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        samples = []
        for _ in range(times + 1):
            started.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            samples.append(1e3 * started.elapsed_time(ended) / IN_GRAPH)
        return samples[1:]


class OnCpu:
    """The way of most engines: trees by `build`, one request after the other. `building`: its microseconds by run."""

    def __init__(self, block: Block, build: Build) -> None:
        self._block = block
        self._build = build
        self.building: list[float] = []

    def run(self) -> list[Lists]:
        """Build."""
        self._block.download(CANDIDATES)
        host = self._block.host
        started = time.perf_counter()
        trees = [
            self._build(host["lp"][b], host["ids"][b], int(host["roots"][b]), int(host["budgets"][b]))
            for b in range(len(host["roots"]))
        ]
        self.building.append(1e6 * (time.perf_counter() - started))
        for b, (tokens, parents) in enumerate(trees):
            n = len(tokens)
            seen = visible(parents)
            host["tokens"][b, :n] = tokens
            host["positions"][b, :n] = START - 1 + seen.sum(1)
            packed = np.packbits(seen, axis=1, bitorder="little")
            host["ancestors"][b].view(np.uint8)[:n, : packed.shape[1]] = packed
        self._block.upload(WANTED)
        self._block.wait()
        return trees


def visible(parents: Sequence[int]) -> np.ndarray:
    """bool [M, M]: row i sees its ancestors and itself."""
    seen = np.eye(len(parents), dtype=bool)
    for i, parent in enumerate(parents[1:], start=1):
        seen[i, :i] = seen[parent, :i]
    return seen


def by_heap(lp: np.ndarray, ids: np.ndarray, root: int, budget: int) -> Lists:
    """Best first, as the paper's own code and the engines that follow it: doubles, rank tuples, child maps."""
    costs, names = lp.astype(np.float64).tolist(), ids.tolist()
    tokens, parents, children = [root], [ROOT], [{}]
    first = costs[0][0]
    heap = [(-first, (0,), 0, 1, 0, first)]
    while heap and len(tokens) <= budget:
        _, ranks, parent, depth, rank, score = heappop(heap)
        node, token = len(tokens), names[depth - 1][rank]
        tokens.append(token)
        parents.append(parent)
        children.append({})
        children[parent][token] = node
        row = costs[depth - 1]
        if rank + 1 < len(row):
            sibling = score - row[rank] + row[rank + 1]
            heappush(heap, (-sibling, (*ranks[:-1], rank + 1), parent, depth, rank + 1, sibling))
        if depth < len(costs):
            child = score + costs[depth][0]
            heappush(heap, (-child, (*ranks, 0), node, depth + 1, 0, child))
    return tokens, parents


def by_spec(lp: np.ndarray, ids: np.ndarray, root: int, budget: int) -> Lists:
    """kdtp's own tree on the CPU."""
    built = tree.build(Marginals(torch.from_numpy(lp), torch.from_numpy(ids)), root, budget, len(lp))
    return list(built.tokens), list(built.parents)
