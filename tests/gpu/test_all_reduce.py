"""The pushed all-reduce: ranks as streams of one process, and as two processes that map each other's memory, all on one
GPU. Its single calls are cases_all_reduce.py's; GPUs of their own are in tests/multi."""

from __future__ import annotations

import pytest
import torch

from kdtp.kernels import cuda
from kdtp.kernels.peers import Peers, room_bytes
from kdtp.model.comm import sum_in_order
from tests import reduce_ranks
from tests.gpu.conftest import missing
from tests.reduce_rank import same

MOST = 1 << 20
WIDTH, EPS = 1024, 1e-5
ROUNDS = 20


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> reduce_ranks.Found:
    """Of two processes."""
    if reason := missing():
        pytest.skip(f"two processes on one GPU: {reason}")
    return reduce_ranks.run(2, "gloo", tmp_path_factory.mktemp("ranks"), 100)


@pytest.mark.parametrize("task", ["eager", "replayed"])
def test_two_processes_sum_alike(found: reduce_ranks.Found, task: str) -> None:
    reduce_ranks.check_sums(found, task)


def test_another_shape_is_found_out(found: reduce_ranks.Found) -> None:
    reduce_ranks.check_unlike(found)


def test_a_rank_that_has_ended_is_named(found: reduce_ranks.Found) -> None:
    reduce_ranks.check_gone(found)


class Streams:
    """Ranks that are streams: the calls of each are a graph, so that nothing but kernels is started while some wait."""

    def __init__(self, size: int, dtype: torch.dtype, rows: int) -> None:
        self.size, self.rows = size, rows
        self.x, self.residual = (torch.zeros(size, rows, WIDTH, dtype=dtype, device="cuda") for _ in range(2))
        self.weight = torch.linspace(0.5, 2, WIDTH, device="cuda")
        for peers in self._ranks(0.001):  # kernels are loaded by a call, which nobody answers
            self._calls(peers, 0)
        torch.cuda.synchronize()
        self._peers = self._ranks(5.0)
        self._streams = [torch.cuda.Stream() for _ in range(size)]
        made = [self._capture(rank) for rank in range(size)]
        self._graphs, self.outs = [graph for graph, _ in made], [out for _, out in made]

    def _ranks(self, timeout: float) -> list[Peers]:
        size, device = room_bytes(self.size, MOST), torch.device("cuda")
        self._rooms = [torch.full((size,), 0xFF, dtype=torch.uint8, device=device) for _ in range(self.size)]
        places = [room.data_ptr() for room in self._rooms]
        return [Peers(rank, places, MOST, 132, timeout, device) for rank in range(self.size)]

    def _calls(self, peers: Peers, rank: int) -> tuple[torch.Tensor, ...]:
        """A sum, a normed sum of the same, and the sum of what that gave: three calls, so that halves change places."""
        total = peers.all_reduce(self.x[rank])
        normed = peers.all_reduce_norm(self.x[rank], self.residual[rank], self.weight, EPS)
        return total, normed, peers.all_reduce(normed)

    def _capture(self, rank: int) -> tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, ...]]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._streams[rank]):
            out = self._calls(self._peers[rank], rank)
        return graph, out

    def replay(self, order: list[int]) -> None:
        """All ranks, started in this order."""
        torch.cuda.synchronize()
        for rank in order:
            with torch.cuda.stream(self._streams[rank]):
                torch.cuda._sleep(1000 * (rank * 7919 % 100))
                self._graphs[rank].replay()
        torch.cuda.synchronize()
        assert [peers.failure() for peers in self._peers] == [None] * self.size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_streams_sum_alike(size: int, dtype: torch.dtype) -> None:
    ranks = Streams(size, dtype, 8)
    for turn in range(ROUNDS):
        ranks.x.copy_(torch.randn_like(ranks.x) * 10 ** torch.randint(-2, 3, ranks.x.shape, device="cuda"))
        ranks.residual.copy_(torch.randn_like(ranks.residual[0]))
        total, kept = sum_in_order(ranks.x), ranks.residual[0].clone()
        normed = cuda.rms_norm(total, ranks.weight, EPS, kept)
        again = sum_in_order(normed.expand(size, -1, -1))
        ranks.replay([(turn + i) % size for i in range(size)])
        for rank, (found_total, found_normed, found_again) in enumerate(ranks.outs):
            assert same(found_total, total), (turn, rank)
            assert same(ranks.residual[rank], kept), (turn, rank)
            assert same(found_normed, normed), (turn, rank)
            assert same(found_again, again), (turn, rank)
