"""Which messages are pushed, and when none are: what ranks agree on, without GPUs."""

import re

import pytest
import torch
from compare import assert_same_bits
from hypothesis import given, settings
from hypothesis import strategies as st

from kdtp.kernels import abi, peers
from kdtp.kernels.abi import KernelError
from kdtp.model import push
from kdtp.model.comm import Comm, Solo
from kdtp.model.layers import Norm
from tests.conftest import ROOT

HEADER = (ROOT / "csrc" / "params.h").read_text()
KERNEL = (ROOT / "csrc" / "kernels" / "all_reduce.cuh").read_text()
OP = (ROOT / "csrc" / "ops" / "all_reduce.cu").read_text()


class Noted(Comm):
    """One of `size` ranks, alone: notes what it is asked for."""

    def __init__(self, size=2):
        self.rank, self.size, self.asked = 0, size, []

    def all_reduce(self, x):
        self.asked.append(("base", tuple(x.shape)))
        return 2 * x

    def all_gather(self, x):
        return torch.stack([x] * self.size)


class Kernel:
    """In the place of Peers."""

    def __init__(self, asked, text=None):
        self.asked, self.text = asked, text

    def all_reduce(self, x):
        assert x.is_contiguous()
        self.asked.append(("push", tuple(x.shape)))
        return 2 * x

    def all_reduce_norm(self, x, residual, weight, eps):
        self.asked.append(("push+norm", tuple(x.shape)))
        residual += 2 * x
        return Norm(weight, eps)(residual)

    def failure(self):
        return self.text


def pushing(most=256, text=None):
    base = Noted()
    return push.Push(base, [1, 2], Kernel(base.asked, text), most), base.asked


@pytest.mark.parametrize(
    ("shape", "dtype", "way"),
    [
        ((1, 64), torch.float32, "push"),
        ((2, 64), torch.float32, "base"),  # above `most`
        ((2, 64), torch.bfloat16, "push"),
        ((1,), torch.float32, "base"),  # not whole packs
        ((3, 3), torch.float32, "base"),
        ((2, 8), torch.int32, "base"),
        ((0, 64), torch.float32, "base"),
    ],
)
def test_what_is_pushed(shape, dtype, way):
    comm, asked = pushing()
    x = torch.ones(shape, dtype=dtype)
    assert_same_bits(comm.all_reduce(x), 2 * x)
    assert asked == [(way, shape)]


def test_a_transposed_message():
    comm, asked = pushing()
    x = torch.arange(32.0).view(8, 4).T
    assert_same_bits(comm.all_reduce(x), 2 * x)
    assert asked == [("push", (4, 8))]


@pytest.mark.parametrize(
    ("shape", "dtype", "way"),
    [
        ((4, 16), torch.float32, "push+norm"),
        ((5, 16), torch.float32, "base"),
        ((4, 6), torch.float32, "push"),  # rows are not whole packs
        ((1, peers.NORMED), torch.bfloat16, "push+norm"),
        ((1, peers.NORMED + 8), torch.bfloat16, "push"),
    ],
)
def test_what_is_normed_with_it(shape, dtype, way):
    comm, asked = pushing(256 if shape[0] > 1 else 1 << 20)
    x, norm = torch.randn(shape).to(dtype), Norm(torch.ones(shape[1]), 1e-5)
    residual = torch.randn(shape).to(dtype)
    want = norm.add(2 * x, residual)
    found = comm.all_reduce_norm(x, residual.clone(), norm)
    assert asked == [(way, shape)]
    for a, b in zip(found, want, strict=True):
        assert_same_bits(a, b)


def test_a_little_float32_is_gathered_by_a_sum():
    comm, asked = pushing()
    comm.rank = 1
    x = torch.tensor([[1.5, -2.0], [float("-inf"), 7.0]])
    want = torch.stack([torch.zeros(2, 2), 2 * x])  # the kernel's stand-in doubles
    assert_same_bits(torch.nan_to_num(comm.all_gather(x), nan=0.0), torch.nan_to_num(want, nan=0.0))
    assert asked == [("push", (2, 2, 2))]
    for other in (x.double(), x.to(torch.bfloat16), torch.ones(3), torch.ones(push.MOST_GATHERED)):
        comm.all_gather(other)
    assert len(asked) == 1


def test_every_call_is_counted_once_whichever_way_it_goes():
    few, many = pushing(256)[0], pushing(0)[0]
    x, norm = torch.ones(2, 16), Norm(torch.ones(16), 1e-5)
    for comm in (few, many):
        comm.all_reduce(x)
        comm.all_gather(x.double())
    assert few.made == many.made != 0
    before = few.made
    few.all_reduce_norm(x, x.clone(), norm)
    assert few.made != before


def test_comms_without_a_kernel_norm_what_they_sum():
    x, residual, norm = torch.randn(3, 8), torch.randn(3, 8), Norm(torch.rand(8), 1e-5)
    for comm, total in ((Solo(), x), (Noted(), 2 * x)):
        for a, b in zip(comm.all_reduce_norm(x, residual, norm), norm.add(total, residual), strict=True):
            assert_same_bits(a, b)
        comm.check()


def test_a_failure_is_raised():
    pushing()[0].check()
    with pytest.raises(RuntimeError, match="nothing from rank 1"):
        pushing(text="all-reduce 7: nothing from rank 1 within 2 s")[0].check()


def told(*words):
    """Peers that have found these words in memory."""
    made = object.__new__(peers.Peers)
    made._fixed = {"timeout_ns": 1_500_000_000}
    made._failure = torch.tensor([*words] + [0] * (8 - len(words)), dtype=torch.int32)
    return made.failure()


def test_what_is_said_of_failures():
    assert told() is None
    assert told(1, 3, 12) == "all-reduce 12: nothing from rank 3 within 1.5 s"
    assert told(2, 0, 12, 9, 4, 7168) == "all-reduce 12: rank 0 was in all-reduce 9 of [4, 7168]"


TIMES = st.lists(st.tuples(st.floats(1, 100), st.floats(1, 100)), min_size=len(push.SIZES), max_size=len(push.SIZES))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(TIMES)
def test_crossover(times):
    ours, theirs = zip(*times, strict=True)
    found = push.crossover(push.SIZES, ours, theirs)
    faster = [size for size, a, b in zip(push.SIZES, ours, theirs, strict=True) if a < b]
    assert found in (0, *faster)
    assert all(size in faster for size in push.SIZES if size <= found)
    after = [size for size in push.SIZES if size > found]
    assert not after or after[0] not in faster


def test_unmapped_pairs_are_named():
    opened = torch.tensor([[True, True, True], [False, True, True], [True, False, True]])
    assert push.unmapped(opened) == [
        "rank 1 cannot map the memory of rank 0",
        "rank 2 cannot map the memory of rank 1",
    ]
    assert push.unmapped(torch.ones(2, 2).bool()) == []


@pytest.fixture
def rooms(monkeypatch):
    """Rooms of three ranks, of which this is rank 0; those that were closed; and whose memory cannot be opened."""
    closed, shut = [], set()

    def open_room(handle, device):
        if int(handle[0]) in shut:
            raise KernelError("room_open: peer access is not supported (CUDA error 217)")
        return 100 + int(handle[0])

    def gather(base, x):
        cards = torch.stack([x] * 3)
        if x.numel() > peers.HANDLE:  # handles, multiprocessors, whether there is a room
            cards[:, 0] = torch.arange(3)
            cards[:, peers.HANDLE] = torch.tensor([132, 128, 132])
        return cards

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(peers, "make_room", lambda *a: (100, torch.zeros(peers.HANDLE, dtype=torch.uint8)))
    monkeypatch.setattr(peers, "open_room", open_room)
    monkeypatch.setattr(peers, "close_room", lambda room, device, own: closed.append((room, own)))
    monkeypatch.setattr(push, "_gather", gather)
    return closed, shut


def test_all_rooms_and_the_smallest_gpu(rooms):
    assert push._map(Noted(3)) == ([100, 101, 102], 128)
    assert rooms[0] == []


def test_a_pair_that_cannot_map_its_memory_is_said_and_nothing_is_pushed(rooms, caplog, monkeypatch):
    closed, shut = rooms
    shut.add(2)
    monkeypatch.setattr(push.logger, "propagate", True)
    base = Noted(3)
    assert push.connect(base, 1.0) is base
    assert closed == [(101, False), (100, True)]  # others' first
    assert "the memory of rank 2: room_open: peer access is not supported" in caplog.text
    assert "not by push: rank 0 cannot map the memory of rank 2" in caplog.text


def test_more_ranks_than_the_kernel_has(caplog, monkeypatch):
    monkeypatch.setattr(push.logger, "propagate", True)
    base = Noted(9)
    assert push.connect(base, 1.0) is base
    assert "9 ranks, at most 8 can" in caplog.text


def test_python_and_the_kernel_agree():
    fields = [name for name, _ in abi.structs(HEADER)["all_reduce"]._fields_]
    assert [name for name in fields if name.startswith("room")] == [f"room{i}" for i in range(peers.MOST_RANKS)]

    def constant(name, source):
        return int(re.search(rf"constexpr int {name} = (\d+);", source).group(1))

    assert constant("kReduceBlocksMost", KERNEL) == peers.BLOCKS
    assert constant("kReduceRanksMost", KERNEL) == peers.MOST_RANKS
    assert constant("kNormedMost", OP) == peers.NORMED
    assert peers.room_bytes(3, 1024) == 2 * 3 * (4096 + 1024)
