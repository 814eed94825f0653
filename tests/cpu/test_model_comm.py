"""Collectives: sums in rank order, and two real processes over gloo."""

import os
import socket

import pytest
import torch
from compare import assert_same_bits
from model_cases import GOLDEN, Ranks

from kdtp.model.comm import Solo, connect, sum_in_order
from kdtp.model.shard import Shard
from kdtp.types import SeqRows
from tests import apart


def test_sums_go_from_rank_to_rank():
    big = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24)])
    assert sum_in_order(big[:, None]).item() == 0.0  # ((big + 1) + 1) - big: both ones are lost
    assert sum_in_order(big[[1, 2, 0, 3], None]).item() == 2.0


def test_bfloat16_is_summed_in_float32():
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    total = sum_in_order(parts)
    assert (total.dtype, total.item()) == (torch.bfloat16, 258.0)


def test_one_rank_needs_no_group():
    comm = connect("cpu", 0, 1, 1.0)
    x = torch.arange(3)
    assert isinstance(comm, Solo)
    assert_same_bits(comm.all_reduce(x), x)
    assert_same_bits(comm.all_gather(x), x[None])


def check_rank(rank, out):
    """One of two ranks."""
    comm = connect("cpu", rank, 2, 30.0)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        x = torch.tensor([[1, 2, 3]], dtype=dtype) * (rank + 1)
        assert comm.all_gather(x).tolist() == [[[1, 2, 3]], [[2, 4, 6]]], dtype
        assert comm.all_reduce(x).tolist() == [[3, 6, 9]], dtype
        assert comm.all_gather(x[:, 1:2].T).tolist() == [[[2]], [[4]]]
    assert comm.all_gather(torch.empty(0, 4)).shape == (2, 0, 4)
    shard = Shard.load(GOLDEN["model_v3"], comm, "float32", 4, lambda done, total: None)
    logits = shard.forward_tokens([SeqRows(0, 0, tuple(range(20)), tuple(range(-1, 19)), 20, (2,))])
    full = torch.cat(list(comm.all_gather(logits)), 1)
    torch.save((full, comm.all_gather(full), shard.vocab_start), out)


@pytest.fixture
def meeting(monkeypatch):
    """Where ranks meet, as torchrun tells them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))


def test_two_processes_equal_two_threads_bit_for_bit(tmp_path, meeting):
    outs = [tmp_path / f"{rank}.pt" for rank in (0, 1)]

    def both():
        other = os.fork()
        rank = int(other == 0)
        check_rank(rank, outs[rank])
        if rank == 1:
            os._exit(0)  # as workers leave: torch's teardown may abort while the other rank is in its own
        assert os.waitpid(other, 0)[1] == 0

    apart.run(both, 60)
    ranks = Ranks(GOLDEN["model_v3"], 2)
    want = ranks.run(0, 0, range(20))
    for rank, out in enumerate(outs):
        full, from_both, vocab_start = torch.load(out)
        assert_same_bits(full[:, : want.shape[1]], want)
        assert torch.equal(from_both[0], from_both[1])
        assert vocab_start == ranks.shards[rank].vocab_start


def test_a_missing_peer_is_an_error_after_the_timeout(meeting):
    with pytest.raises(AssertionError, match=r"Error: .*[Tt]imed? ?out"):
        apart.run(lambda: connect("cpu", 0, 2, 1.0), 60)


def test_tokens_outside_the_vocabulary_and_double_sequences():
    ranks = Ranks(GOLDEN["model_tiny"])
    with pytest.raises(ValueError, match="sequence 4: token 512 of 512"):
        ranks.run(4, 0, [1, 512])
    rows = ranks.rows(5, 0, [1])
    with pytest.raises(RuntimeError, match="a batch with a sequence twice"):
        ranks.forward(rows, SeqRows(5, 1, (1,), (-1,), 1))
