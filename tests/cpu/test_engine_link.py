"""Links and RPC over real sockets, with peers that behave badly."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from unittest.mock import Mock

import msgspec
import psutil
import pytest
import zmq
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kdtp.config import DrafterConfig, EngineConfig
from kdtp.engine import child as children
from kdtp.engine import lane, rankend, rundir
from kdtp.engine.child import Child
from kdtp.engine.fleet import Fleet
from kdtp.engine.handshake import Handshake
from kdtp.engine.host import Host
from kdtp.engine.link import EngineFault, ZmqLink
from kdtp.engine.plan import plan
from kdtp.engine.rankend import RankEnd
from kdtp.engine.rpc import Client, EngineDead, Server
from kdtp.messages import (
    PROTOCOL_VERSION,
    Begin,
    Commit,
    Failed,
    Fault,
    Finished,
    Forward,
    Hello,
    Ids,
    Progress,
    Ready,
    Shutdown,
    Status,
    StatusQuery,
    Submit,
    Tokens,
    ToWorker,
    Usage,
    Welcome,
)
from kdtp.server.metrics import Metrics
from kdtp.types import Grammar, Rule, SamplingParams
from kdtp.version import __version__
from kdtp.watch import Round
from tests import processes
from tests.dflash import drafter_folder, spoilt
from tests.dflash_cases import V1
from tests.paths import TINY
from tests.processes import collect

EPOCH = 99


@pytest.fixture
def folder():
    path = rundir.create()
    yield path
    rundir.remove(path)


@pytest.fixture
def context():
    with zmq.Context() as made:
        yield made


class Peer:
    """A hand-driven worker: it speaks over ZeroMQ until it joins, then over its lane."""

    def __init__(self, context, folder, rank=0, identity=b"peer"):
        self.lane = None
        self.path = rundir.lane(folder, rank)
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(rundir.endpoint(folder, f"rank-{rank}"))

    def join(self):
        welcome = self.hear(Welcome)
        self.lane = lane.connect(self.path)
        return welcome

    def say(self, *frames):
        frames = [f if isinstance(f, bytes) else msgspec.msgpack.encode(f) for f in frames]
        if self.lane is None:
            self.socket.send_multipart(frames)
        else:
            self.lane.send(*frames)

    def hear(self, kind):
        if self.lane is None:
            assert self.socket.poll(20_000), "nothing came"
            return msgspec.msgpack.decode(self.socket.recv(), type=kind)
        got = []
        until(lambda: got.append(self.lane.receive()) or got[-1])
        return msgspec.msgpack.decode(got[-1][0], type=kind)


def hello(rank=0, **changes):
    values = {"protocol": PROTOCOL_VERSION, "version": __version__, "rank": rank, "world_size": 1, "pid": os.getpid()}
    return Hello(**{**values, **changes})


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen"
        time.sleep(0.005)


def ready_fleet(context, folder, busy=False, **settings):
    config = EngineConfig("fake", tp=1, **settings)
    link = ZmqLink(context, folder, 0)
    fleet = Fleet([link], EPOCH, config.step_timeout, busy)
    handshake = Handshake(fleet, config, os.getpid())
    peer = Peer(context, folder)
    peer.say(hello())
    assert not handshake.advance(2.0)
    welcome = peer.join()
    peer.say(Progress(EPOCH, 0, 5, 10))
    peer.say(Ready(EPOCH, 0, welcome.config_hash, "model"))
    until(lambda: handshake.advance(0.1))
    assert handshake.loaded == (5, 10)
    return fleet, link, peer


def answer(peer, *messages):
    """Answers waiting before the question: the coordinator's step reads them after it has sent."""
    for message in messages:
        peer.say(*(message if isinstance(message, tuple) else (message,)))


def hear_out(fleet, count):
    """Let the fleet read until it has dropped so many frames."""
    until(lambda: list(fleet.arrivals(time.monotonic() + 0.02)) or fleet.dropped().total() >= count)


def test_a_step_survives_garbage_strangers_and_stale_frames(context, folder):
    fleet, _, peer = ready_fleet(context, folder)
    stranger = Peer(context, folder, identity=b"stranger")
    for frames in ([b"\xc1garbage"], [b""], [b"a", b"b", b"c"], [Ids(EPOCH, 1, 0, ())], [hello()]):
        stranger.say(*frames)
    again = lane.connect(peer.path)  # of the right process, but it has one
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.sendall(bytes(99))"
    subprocess.run([sys.executable, "-c", code, str(peer.path)], check=True, timeout=20)
    hear_out(fleet, 7)
    assert stranger.hear(Shutdown).reason == "rank 0 is already attached"
    until(lambda: again.receive() or again.ended)
    stale = [Ids(EPOCH + 1, 1, 0, ()), Ids(EPOCH, 0, 0, ()), Ids(EPOCH, 2, 0, ()), Ids(EPOCH, 1, 1, ())]
    garbage = [(b"\xc1",), (b"",), (b"x", b"y"), (msgspec.msgpack.encode({"type": "Ids", "epoch": -1}),), (hello(),)]
    answer(peer, *garbage, *stale, Ids(EPOCH, 1, 0, ()))
    assert fleet.forward([])[0].ids == ()
    dropped = fleet.dropped()
    assert dropped["malformed"] == 4 + 5 and dropped["stranger"] == 3 and dropped["stale"] == len(stale), dropped


def test_an_oversized_frame_of_a_stranger_disturbs_nobody(context, folder):
    fleet, link, peer = ready_fleet(context, folder)
    link.socket.setsockopt(zmq.MAXMSGSIZE, 1000)  # for connections made from here on
    stranger = Peer(context, folder, identity=b"stranger")
    stranger.say(b"x" * 100_000)
    answer(peer, Ids(EPOCH, 1, 0, ()))
    assert fleet.forward([])[0].ids == ()


def test_an_oversized_frame_of_a_rank_is_its_end_behind_what_it_said(context, folder):
    fleet, _, peer = ready_fleet(context, folder)
    answer(peer, Ids(EPOCH, 1, 0, ()))
    peer.lane._socket.send(lane.HEADER.pack(3, lane.MAX_FRAME + 1) + b"abc")
    assert fleet.forward([])[0].ids == ()
    with pytest.raises(EngineFault, match=f"rank 0 sent a message of 3 bytes with {lane.MAX_FRAME + 1}: must be"):
        fleet.forward([])


def test_what_a_rank_said_before_its_end_is_read(context, folder):
    fleet, _, peer = ready_fleet(context, folder)
    answer(peer, Ids(EPOCH, 1, 0, ()))
    peer.lane.close()
    assert fleet.forward([])[0].ids == ()
    fleet.commit([], [1])
    with pytest.raises(EngineFault, match="rank 0 closed its lane"):
        fleet.forward([])


def test_a_fault_is_told_though_the_rank_is_gone(context, folder):
    fleet, _, peer = ready_fleet(context, folder)
    answer(peer, Fault(EPOCH, 1, 0, "out of memory"))
    peer.lane.close()
    with pytest.raises(EngineFault, match="rank 0 failed: out of memory"):
        fleet.forward([])


def test_a_rank_without_a_lane_is_named(context, folder):
    fleet = Fleet([ZmqLink(context, folder, 0)], EPOCH, 1.0)
    with pytest.raises(EngineFault, match="rank 0 has opened no lane for a Forward"):
        fleet.forward([])
    with pytest.raises(RuntimeError, match=r"no lane to the coordinator: .*rank-1.lane: No such file"):
        lane.connect(rundir.lane(folder, 1))


LONG = Begin(0, 1 << 18, Rule(), prompt=tuple(range(1 << 18)))  # 1.2 MB, more than a socket's buffers hold


def test_a_rank_that_reads_nothing_is_a_fault_at_the_deadline(context, folder):
    fleet, link, _peer = ready_fleet(context, folder, step_timeout=0.2)
    with pytest.raises(EngineFault, match="step 1 not answered in time by rank 0"):
        fleet.forward([], [LONG])
    assert link.lane.writes
    started = time.monotonic()
    fleet.dismiss("the end")
    fleet.close()
    assert time.monotonic() - started < 10.0


def test_messages_larger_than_a_sockets_buffers_go_both_ways(context, folder):
    fleet, _, peer = ready_fleet(context, folder)
    frame = os.urandom(3 << 20)

    def work():
        assert peer.hear(Forward).begun == (LONG,)
        peer.say(Ids(EPOCH, 1, 0, ()), frame)
        until(lambda: peer.lane.receive() or not peer.lane.writes)

    worker = threading.Thread(target=work)
    worker.start()
    assert fleet.forward([], [LONG])[1] == frame
    worker.join()
    assert not fleet.dropped()


def test_the_end_comes_behind_the_steps(context, folder):
    fleet, _, peer = ready_fleet(context, folder)
    fleet.commit([], [1])
    fleet.dismiss("the end")
    fleet.close()
    assert [type(peer.hear(ToWorker)) for _ in range(2)] == [Commit, Shutdown]
    assert peer.lane.receive() is None and peer.lane.ended


def test_a_rank_is_told_to_end_before_it_hears_that_the_coordinator_has(context, folder, monkeypatch):
    monkeypatch.setattr(rankend, "_LAST_PAUSE", 0.0)
    fleet = Fleet([ZmqLink(context, folder, 0)], EPOCH, 5.0)
    handshake = Handshake(fleet, EngineConfig("fake"), os.getpid())
    end = RankEnd(folder, 0)
    end.emit(hello(), None)
    assert not handshake.advance(5.0)
    welcome = end.receive(5.0)
    assert isinstance(welcome, Welcome) and end.receive(0.01) is None
    end.join(welcome.coordinator_pid)
    end.emit(Ready(EPOCH, 0, welcome.config_hash, "model"), None)
    until(lambda: handshake.advance(0.1))
    fleet.links[0].lane.send(b"\xc1")
    fleet.commit([], [2])
    fleet.dismiss("the end")
    fleet.close()
    assert [end.receive(5.0) for _ in range(2)] == [Commit(EPOCH, 0, (), (2,)), Shutdown("the end")]
    with pytest.raises(EOFError, match="the coordinator ended"):
        end.receive(5.0)
    end.close()


def test_a_busy_fleet_sleeps_after_a_while_and_notices_all_that_an_idle_one_does(context, folder):
    fleet, _, peer = ready_fleet(context, folder, busy=True)
    answer(peer, Ids(EPOCH, 1, 0, ()))
    assert fleet.forward([])[0].ids == ()
    late = threading.Timer(0.15, lambda: peer.say(b"\xc1", b"") or peer.say(Ids(EPOCH, 2, 0, ())))
    late.start()
    cpu = time.thread_time()
    assert fleet.forward([])[0].ids == ()  # long after it fell asleep
    assert time.thread_time() - cpu < 0.1
    late.join()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fleet, "_step_timeout", 0.3)
        with pytest.raises(EngineFault, match="step 3 not answered in time by rank 0"):
            fleet.forward([])
    end = threading.Timer(0.01, peer.lane.close)
    end.start()
    with pytest.raises(EngineFault, match="rank 0 closed its lane"):
        fleet.forward([])
    end.join()


def test_a_busy_rank_sleeps_after_a_while(context, folder):
    link, end = ZmqLink(context, folder, 0), RankEnd(folder, 0)
    end.emit(hello(), None)
    until(link.greet)
    end.join(os.getpid())
    link.accept()
    for pause in (0.0, 0.01, 0.15):
        told = threading.Timer(pause, lambda: link.send(Shutdown("the end")))
        told.start()
        cpu = time.thread_time()
        assert end.receive(None, busy=True) == Shutdown("the end")
        assert time.thread_time() - cpu < 0.1
        told.join()
    end.close()
    link.close()


messages = st.lists(st.tuples(st.binary(max_size=40), st.none() | st.binary(min_size=1, max_size=40)), max_size=6)


@given(messages, st.lists(st.integers(1, 50), max_size=20))
def test_a_stream_cut_anywhere_gives_the_messages(told, cuts):
    near, far = socket.socketpair()
    end = lane.Lane(far)
    stream = b"".join(lane.HEADER.pack(len(m), len(f or b"")) + m + (f or b"") for m, f in told)
    ends = [*accumulate(cuts), len(stream)]
    heard = []
    for start, stop in pairwise([0, *ends]):
        near.send(stream[start:stop])
        while (found := end.receive()) is not None:
            heard.append(found)
    assert heard == told and not end.ended
    near.close()
    assert end.receive() is None and end.ended
    end.close()


@given(st.lists(st.integers(0, 200_000), max_size=5))
@hypothesis_settings(deadline=None, max_examples=20)
def test_what_does_not_fit_into_the_sockets_buffer_is_kept(sizes):
    near, far = socket.socketpair()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    sender, receiver = lane.Lane(near), lane.Lane(far)
    told = [(bytes([i]) * size, bytes([i]) * (size // 2) or None) for i, size in enumerate(sizes)]
    for message in told:
        sender.send(*message)
    heard = []
    while sender.writes or len(heard) < len(told):  # each turn moves some of it
        if (found := receiver.receive()) is not None:
            heard.append(found)
        assert sender.receive() is None
    assert heard == told
    sender.close()
    receiver.close()


def test_silence_is_a_fault_at_the_deadline(context, folder):
    fleet, _, _ = ready_fleet(context, folder, step_timeout=0.2)
    with pytest.raises(EngineFault, match="step 1 not answered in time by rank 0"):
        fleet.forward([])


def test_a_coordinator_that_was_stopped_waits_again(context, folder, monkeypatch):
    """Whoever stops it (a debugger, a container's pause) has mostly stopped the ranks, too."""
    monkeypatch.setattr("kdtp.engine.fleet._STOPPED", 0.1)
    fleet, _, _ = ready_fleet(context, folder, step_timeout=0.2)
    waits = []

    def ready(deadline, busy_until):
        waits.append(deadline - time.monotonic())
        time.sleep(0.4 if len(waits) == 1 else 0.0)
        return []

    monkeypatch.setattr(fleet, "_ready", ready)
    with pytest.raises(EngineFault, match="step 1 not answered in time"):
        fleet.forward([])
    assert len(waits) == 2 and waits[1] > 0.1


def test_a_dead_process_is_a_fault_at_once(context, folder):
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    link = ZmqLink(context, folder, 0)
    fleet = Fleet([link], EPOCH, 30.0)
    peer = Peer(context, folder)
    peer.say(hello(pid=child))
    handshake = Handshake(fleet, EngineConfig("fake"), os.getpid())
    assert not handshake.advance(2.0)
    os.kill(child, 9)
    os.waitpid(child, 0)
    with pytest.raises(EngineFault, match=rf"rank 0 \(pid {child}\) ended"):
        handshake.advance(5.0)


@pytest.mark.parametrize("first", [0, 1])
def test_of_ranks_that_end_the_one_that_said_nothing_is_named(context, folder, first, monkeypatch):
    """Rank 1 dies; rank 0 fails in their collective, says so and ends, perhaps before the kernel is done with it."""
    monkeypatch.setattr("kdtp.engine.fleet._MOMENT", 20.0)  # it is over once the other one has ended
    links = [ZmqLink(context, folder, rank) for rank in (0, 1)]
    fleet = Fleet(links, EPOCH, 5.0)
    pids = [os.fork() or time.sleep(60) or os._exit(0) for _ in links]
    for link, pid in zip(links, pids, strict=True):
        near, far = socket.socketpair()
        link.hello, link.pidfd, link.lane = hello(link.rank, pid=pid), os.pidfd_open(pid), lane.Lane(far)
        if link.rank == 0:
            lane.Lane(near).send(msgspec.msgpack.encode(Fault(EPOCH, 1, 0, "connection closed by peer")))
        near.close()

    def end(rank):
        os.kill(pids[rank], signal.SIGKILL)
        os.waitpid(pids[rank], 0)

    end(first)
    later = threading.Timer(0.1, end, [1 - first])
    later.start()
    with pytest.raises(EngineFault) as caught:
        list(fleet.arrivals(time.monotonic() + 5.0))
    assert str(caught.value) == f"rank 1 (pid {pids[1]}) ended; rank 0 failed: connection closed by peer"
    later.join()
    fleet.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "0.0.0"}, ["version 0.0.0", __version__]),
        ({"protocol": 77}, ["protocol 77"]),
        ({"world_size": 3}, ["world size 3", "wanted is 1"]),
    ],
)
def test_a_rank_of_another_make_is_refused_by_name(context, folder, changes, words):
    fleet = Fleet([ZmqLink(context, folder, 0)], EPOCH, 1.0)
    handshake = Handshake(fleet, EngineConfig("fake"), os.getpid())
    peer = Peer(context, folder)
    peer.say(hello(**changes))
    with pytest.raises(EngineFault) as caught:
        handshake.advance(5.0)
    assert all(word in str(caught.value) for word in words)
    assert peer.hear(Shutdown).reason == str(caught.value)


def test_a_rank_with_another_model_is_refused(context, folder):
    links = [ZmqLink(context, folder, rank) for rank in (0, 1)]
    fleet = Fleet(links, EPOCH, 1.0)
    handshake = Handshake(fleet, EngineConfig("fake", tp=2), os.getpid())
    peers = [Peer(context, folder, rank, f"p{rank}".encode()) for rank in (0, 1)]
    for rank, peer in enumerate(peers):
        peer.say(hello(rank, world_size=2))
    until(lambda: not handshake.advance(0.05) and all(link.hello for link in links))
    for rank, peer in enumerate(peers):
        peer.say(Ready(EPOCH, rank, peer.join().config_hash, f"model{rank}"))
    with pytest.raises(EngineFault, match="model hash"):
        until(lambda: handshake.advance(0.1))


def test_loading_has_deadlines(context, folder):
    for settings, words in (({"load_timeout": 0.1}, "load_timeout"), ({"stall_timeout": 0.1}, "no progress")):
        handshake = Handshake(Fleet([], EPOCH, 1.0), EngineConfig("fake", tp=1, **settings), os.getpid())
        with pytest.raises(EngineFault, match=words):
            until(lambda handshake=handshake: handshake.advance(0.05))


# ---------------------------------------------------------------- rpc


def test_rpc_drops_garbage_and_names_the_request_that_was_wrong(context, folder):
    server = Server(context, rundir.endpoint(folder, "rpc"))
    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(rundir.endpoint(folder, "rpc"))
    bad = {"type": "Submit", "request": 5, "prompt": [1], "params": {"top_p": 7.0}}
    for frames in (
        [b"\xc1"],
        [b"a", b"b"],
        [msgspec.msgpack.encode(bad)],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x91" * 200_000],
    ):
        raw.send_multipart(frames)
    assert server.socket.poll(5000)
    until(lambda: not list(server.receive()) and server.dropped["malformed_rpc"] == 5)
    replies = [msgspec.msgpack.decode(raw.recv(), type=Failed) for _ in range(5) if raw.poll(5000)]
    assert [r.code for r in replies] == ["invalid"] * 5
    assert [r.request for r in replies] == [None, None, 5, None, None]
    assert "top_p = 7.0: must be above 0, at most 1" in replies[2].message
    server.close(0)
    raw.close()


def submits(server):
    return [(who, message) for who, message in server.receive() if isinstance(message, Submit)]


def status(upto: int, *labels: int) -> Status:
    """What an engine says that knows these open requests of the client."""
    names = "step running waiting waiting_tokens pages_total pages_free pages_idle load_done load_total"
    empty = dict.fromkeys(names.split(), 0)
    sizes = {"tp": 1, "vocab_size": 9, "max_positions": 9, "worker_pids": (), "counters": {}, "model": "m"}
    return Status(upto=upto, open=labels, state="ready", pid=os.getpid(), version="x", **empty, **sizes)


def test_a_request_that_the_engine_knows_no_more_ends(context, folder):
    server = Server(context, rundir.endpoint(folder, "rpc"))
    client = Client(rundir.endpoint(folder, "rpc"))
    lost, kept, later = (client.submit((1,), SamplingParams()) for _ in range(3))
    got = []
    until(lambda: got.extend(submits(server)) or len(got) == 3)
    who = got[0][0]
    server.send(who, Tokens(lost, 0, (4,)))
    server.send(who, status(kept, kept))  # asked before `later` was submitted
    messages = [message for message, _ in client.events(lost)]
    assert messages[0] == Tokens(lost, 0, (4,)) and messages[1].code == "engine" and len(messages) == 2
    for label in (kept, later):
        server.send(who, Finished(label, "stop", Usage()))
        assert [message.reason for message, _ in client.events(label)] == ["stop"]
    client.close()
    server.close(0)


def test_a_flood_does_not_hold_up_the_rest(context, folder):
    fleet, _, peer = ready_fleet(context, folder)
    stranger = Peer(context, folder, identity=b"stranger")
    for _ in range(900):
        stranger.say(b"\xc1")
    answer(peer, Ids(EPOCH, 1, 0, ()))
    assert fleet.forward([])[0].ids == ()
    server = Server(context, rundir.endpoint(folder, "rpc"))
    client = Client(rundir.endpoint(folder, "rpc"))
    for _ in range(300):
        client._send(StatusQuery())
    until(lambda: server.socket.poll(10))
    assert 0 < len(list(server.receive())) <= 64
    client.close()
    server.close(0)


@pytest.mark.parametrize("kind", [b"Submit", b"StatusQuery", b"Hello"])
def test_deep_nesting_is_only_a_malformed_frame(context, folder, kind):
    """200,000 lists inside each other under a key that comes before the tag."""
    deep = b"\x82\xa1a" + b"\x91" * 200_000 + b"\x00" + b"\xa4type" + bytes([0xA0 + len(kind)]) + kind
    fleet, link, peer = ready_fleet(context, folder)
    answer(peer, (deep,), Ids(EPOCH, 1, 0, ()))
    assert fleet.forward([])[0].ids == () and link.dropped["malformed"] == 1
    server = Server(context, rundir.endpoint(folder, "rpc"))
    raw = context.socket(zmq.DEALER)
    raw.connect(rundir.endpoint(folder, "rpc"))
    raw.send(deep)
    until(lambda: not list(server.receive()) and server.dropped["malformed_rpc"] == 1)
    server.close(0)
    raw.close(0)


def test_a_hello_from_an_impossible_process_is_dropped(context, folder):
    link = ZmqLink(context, folder, 0)
    handshake = Handshake(Fleet([link], EPOCH, 1.0), EngineConfig("fake"), os.getpid())
    values = msgspec.structs.asdict(hello()) | {"type": "Hello"}
    peer = Peer(context, folder)
    for pid in (2**40, 0, -1, 2**31 - 1):
        peer.say(msgspec.msgpack.encode(values | {"pid": pid}))
    until(lambda: not handshake.advance(0.1) and link.dropped["malformed"] + link.dropped["stranger"] == 4)
    assert link.hello is None


def test_client_sorts_events_by_request(context, folder):
    server = Server(context, rundir.endpoint(folder, "rpc"))
    client = Client(rundir.endpoint(folder, "rpc"))
    first, second = (client.submit((1,), SamplingParams()) for _ in range(2))
    got = []
    until(lambda: got.extend(submits(server)) or len(got) == 2)
    who = got[0][0]
    assert isinstance(got[0][1], Submit) and got[0][1].request == first
    for label, tokens in ((second, (7,)), (first, (8, 9)), (second, (6,))):
        assert server.send(who, Tokens(label, 0, tokens))
    for label in (first, second):
        server.send(who, Finished(label, "stop", Usage()))
    assert [m.tokens for m, _ in client.events(first) if isinstance(m, Tokens)] == [(8, 9)]
    assert [m.tokens for m, _ in client.events(second) if isinstance(m, Tokens)] == [(7,), (6,)]
    client.close()
    server.close(0)


@pytest.mark.parametrize("seconds", [0.2, 0.0])
def test_client_of_a_silent_engine_gives_up(context, folder, seconds):
    """One that waits, and one that looks now and then."""
    server = Server(context, rundir.endpoint(folder, "rpc"))
    client = Client(rundir.endpoint(folder, "rpc"), silence=0.5)
    request = client.submit((1,), SamplingParams())
    with pytest.raises(EngineDead, match="no sign of life"):
        for _ in range(1000):
            client.poll([request], seconds)
            time.sleep(0.01)
    client.close()
    server.close(0)


def test_time_in_which_nobody_waited_is_no_silence(context, folder):
    """Of a client whose user thinks, or that was stopped: an engine that was not asked has nothing to say."""
    server = Server(context, rundir.endpoint(folder, "rpc"))
    client = Client(rundir.endpoint(folder, "rpc"), silence=0.5)
    time.sleep(0.6)
    request = client.submit((1,), SamplingParams())
    assert client.poll([request], 0.1) == []
    client.close()
    server.close(0)


def test_an_engine_says_how_long_it_may_be_silent(context, folder):
    server = Server(context, rundir.endpoint(folder, "rpc"))
    client = Client(rundir.endpoint(folder, "rpc"), silence=60.0)
    client.usages = True
    request = client.submit((1,), SamplingParams())
    got = []
    until(lambda: got.extend(server.receive()) or len(got) >= 2)
    server.send(got[0][0], msgspec.structs.replace(status(1, request), patience=0.1))
    started = time.monotonic()
    with pytest.raises(EngineDead, match="no sign of life from the engine for 2 s"):
        list(client.events(request))
    assert 1.5 < time.monotonic() - started < 8.0
    asked = [m for _, m in server.receive() if isinstance(m, StatusQuery)]
    assert asked and all(query.usages for query in asked), "also those that are sent because nothing came"
    client.close()
    server.close(0)


@pytest.mark.parametrize("told", [True, False])
def test_last_words_may_come_behind_the_news_of_the_end(context, folder, told, monkeypatch):
    """The engine has sent them, but a thread of ZeroMQ's still has to read them."""
    if told:
        monkeypatch.setattr("kdtp.engine.rpc._LAST_WORDS", 20_000)
    engine = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    server = Server(context, rundir.endpoint(folder, "rpc"))
    client = Client(rundir.endpoint(folder, "rpc"))
    request = client.submit((1,), SamplingParams())
    got = []
    until(lambda: got.extend(submits(server)) or got)
    server.send(got[0][0], msgspec.structs.replace(status(request, request), pid=engine.pid))
    client.status()
    engine.communicate()
    last = threading.Timer(0.05, lambda: told and server.send(got[0][0], Failed(request, "engine", "rank 1 ended")))
    last.start()
    try:
        if told:
            assert [message.message for message, _ in client.events(request)] == ["rank 1 ended"]
        else:
            with pytest.raises(EngineDead, match="the engine has ended"):
                list(client.events(request))
    finally:  # or the context's end would wait for ever
        last.join()
        client.close()
        server.close(0)


def test_a_client_that_left_is_noticed_on_the_next_message(context, folder):
    server = Server(context, rundir.endpoint(folder, "rpc"))
    client = Client(rundir.endpoint(folder, "rpc"))
    client.submit((1,), SamplingParams())
    got = []
    until(lambda: got.extend(submits(server)) or got)
    client.close()
    until(lambda: not server.send(got[0][0], Tokens(1, 0, (1,))))
    assert server.dropped["unreachable_client"] == 1
    server.close(0)


@contextmanager
def hosted(folder, **settings):
    """An engine of one rank in a thread, and a client of it."""
    host = Host(plan(EngineConfig(str(TINY), threads=1, **settings)), folder)
    running = threading.Thread(target=host.run)
    running.start()
    client = Client(rundir.endpoint(folder, "rpc"))
    try:
        until(lambda: client.status().state == "ready", 20)
        yield host, client
    finally:
        host.stop(signal.SIGTERM, None)
        client.close()
        running.join(20)


class Anything:
    """The grammar of every text."""

    ends, error = frozenset({0}), ""

    def mask(self):
        return b"\xff" * 64

    def advance(self, token):
        pass

    def rollback(self, count):
        pass


def test_grammars_are_compiled_beside_the_rounds(folder):
    gate = threading.Event()

    def compile_(grammar):
        assert gate.wait(20)
        if grammar.text == "bad":
            raise ValueError("grammar: bad")
        return Anything()

    with hosted(folder, max_queue=3) as (host, client):
        host._compiling._compile = compile_
        good, bad = (SamplingParams(max_tokens=4, grammar=Grammar("regex", text)) for text in ("good", "bad"))
        first, second, third, fourth = (client.submit((5,), params) for params in (good, good, bad, good))
        client.watch(first, 2)
        client.cancel(second)
        assert collect(client, client.submit((6,), SamplingParams()))[1].reason == "length", "others go on"
        assert collect(client, fourth)[1].reason.startswith("3 grammars wait to be compiled")
        assert collect(client, second)[1].reason == "cancelled"
        status = client.status()
        assert status.open == (first, third) and status.waiting == 2
        gate.set()
        told = [message for message, _ in client.events(first)]
        assert sum(isinstance(message, Round) for message in told) == 2 and told[-1].usage.completion_tokens > 0
        assert collect(client, third)[1].message == "grammar: bad"
        gate.clear()
        last = client.submit((5,), good)
        until(lambda: client.status().waiting == 1)
        host.stop(signal.SIGTERM, None)
        assert collect(client, last)[1].code == "shutdown"
        gate.set()


def test_an_engine_that_breaks_says_what_it_has_counted(folder):
    with hosted(folder, ping_interval=0.05) as (host, client):
        until(lambda: client.status().step_ages, 20)
        assert 0 <= client.latest.step_ages[0] < 5 and client.latest.counters["desync_failures"] == 0
        host._fleet.desync_failures = 1
        host._fleet.forward = Mock(side_effect=EngineFault("ranks parted"))  # a ping comes
        until(lambda: client.poll((), 0.1) or client.latest.fault)
        with pytest.raises(EngineDead, match=r"^ranks parted$"):  # also for who asked for nothing, and after its end
            client.status()
        metrics = Metrics()
        for _ in range(2):
            metrics.engine_died(client.latest)
        lines = metrics.text(client.latest, 100.0, "restarting", 0.0, 2).splitlines()
        assert "kdtp:desync_failures_total 2" in lines
        (age,) = (line.split()[1] for line in lines if line.startswith('kdtp:worker_last_step_age_seconds{rank="0"}'))
        assert 100 <= float(age) < 110


def test_what_a_coordinator_cannot_load_is_said_as_it_is(folder, tmp_path, caplog):
    checked = plan(EngineConfig(str(TINY), threads=1))
    drafter = drafter_folder(tmp_path, V1, checked.model)
    said = spoilt(drafter, "layers.1.mlp.up_proj.weight")
    config = DrafterConfig("dflash", model=str(drafter), placement="coordinator")
    host = Host(plan(replace(checked.config, drafter=config)), folder)
    running = threading.Thread(target=host.run)
    client = Client(rundir.endpoint(folder, "rpc"))
    until(lambda: host._rpc.socket.poll(0), 20)  # its question; the answer comes with the end
    running.start()
    with pytest.raises(EngineDead) as caught:
        until(lambda: client.status().state == "ready", 20)
    assert str(caught.value) == said and not any(record.exc_info for record in caplog.records)
    client.close()
    running.join(20)


# ---------------------------------------------------------------- run folder


def test_run_folder_is_private_and_held_by_one(folder):
    assert folder.stat().st_mode & 0o777 == 0o700
    held = rundir.lock(folder)
    with pytest.raises(ValueError, match="another engine runs in it"):
        rundir.lock(folder)
    os.close(held)
    folder.chmod(0o755)
    with pytest.raises(ValueError, match="chmod 700"):
        rundir.check(folder)
    folder.chmod(0o700)
    with pytest.raises(ValueError, match="not a folder"):
        rundir.check(folder / "missing")
    deep = folder / ("x" * 100)
    deep.mkdir(mode=0o700)
    with pytest.raises(ValueError, match="107 bytes"):
        rundir.check(deep)


def test_folders_of_killed_engines_are_swept_and_no_others(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    dead, held, young, used = (rundir.create() for _ in range(4))
    foreign = tmp_path / "kdtp-notes"  # not of our making, whatever its name
    foreign.mkdir()
    for name in ("rpc.ipc", "rank-0.ipc", "rank-0.lane", "engine.json"):
        (dead / name).touch()
    (used / "thesis.txt").touch()
    lock = rundir.lock(held)
    for path in (dead, held, used, foreign):
        os.utime(path, (1, 1))
    fresh = rundir.create()
    assert sorted(tmp_path.iterdir()) == sorted([held, young, fresh, used, foreign])
    assert [path.name for path in used.iterdir()] == ["thesis.txt"]
    os.close(lock)


@pytest.mark.parametrize(("name", "size"), [("a", 90), ("ü", 45)])
def test_no_folder_is_left_where_sockets_have_no_room(monkeypatch, tmp_path, name, size):
    """A path is as long as its bytes are many."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        place = Path(short) / (name * size)
        place.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(place))
        with pytest.raises(ValueError, match=r"may have 107 bytes; use a shorter one \(XDG_RUNTIME_DIR or TMPDIR says"):
            rundir.create()
        assert not list(place.iterdir())


def test_nothing_is_left_of_an_engine_that_cannot_be_started(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    checked = plan(EngineConfig(str(TINY), tp=2))
    full = OSError(errno.ENOSPC, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", Mock(side_effect=full))
        with pytest.raises(ValueError, match=rf"run folder in {tmp_path}: No space left on device \(XDG"):
            Child(checked)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", Mock(side_effect=OSError(errno.EMFILE, "Too many open files")))
        with pytest.raises(EngineDead, match="the engine could not be started: Too many open files"):
            Child(checked)
    child = Child(checked)
    with monkeypatch.context() as patch:
        patch.setattr("kdtp.engine.child.Client", Mock(side_effect=zmq.ZMQError(errno.EMFILE)))
        with pytest.raises(EngineDead, match="no way to the engine: Too many open files"):
            child.client()
    with pytest.raises(EngineDead, match="ended with code"):
        child.check()
    assert not list(tmp_path.iterdir())


def test_an_engine_ends_though_a_forked_process_holds_its_input(monkeypatch):
    monkeypatch.setattr(children, "_END_TIMEOUT", 30.0)
    child = Child(plan(EngineConfig(str(TINY), tp=2)))
    forked = os.fork() or time.sleep(60) or os._exit(0)
    started = time.monotonic()
    child.end()
    child.tidy()
    assert time.monotonic() - started < 20.0
    os.kill(forked, signal.SIGKILL)
    os.waitpid(forked, 0)


def test_what_is_forked_has_no_part_in_an_engine(tmp_path):
    """It does not end it, nor take its folder away; and it does not keep it when the owner ends, even by SIGKILL."""
    code = f"""
import os, time
from kdtp.config import EngineConfig
from kdtp.engine.child import Child
from kdtp.engine.plan import plan
child = Child(plan(EngineConfig({str(TINY)!r})))
forked = os.fork()
if not forked:
    child.end()
    child.tidy()
os.write(1, f"{{forked}} {{child._process.pid}} {{child.address}}\\n".encode())  # both write
time.sleep(60)
"""
    with processes.start([sys.executable, "-c", code], tmp_path / "log") as owner:
        try:
            (zero, *_), (forked, pid, address) = sorted(owner.stdout.readline().split() for _ in range(2))
            engine, folder = psutil.Process(int(pid)), Path(address.removeprefix("ipc://")).parent
            assert zero == "0" and engine.is_running() and (folder / rundir.SETTINGS).exists()
            owner.kill()
            until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE, 20)
            assert psutil.pid_exists(int(forked)) and not folder.exists()
        finally:
            os.killpg(owner.pid, signal.SIGKILL)


def test_a_folder_of_the_user_keeps_what_is_his(tmp_path):
    (tmp_path / "thesis.txt").touch()
    (tmp_path / "rpc.ipc").touch()
    (tmp_path / "rank-3.lane").touch()
    (tmp_path / "scratch").mkdir()
    os.close(rundir.lock(tmp_path))
    rundir.clean(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    (tmp_path / "rank-3.lane").mkdir()
    with pytest.raises(ValueError, match=r"lane .*rank-3\.lane: Is a directory"):
        lane.listen(tmp_path / "rank-3.lane")
    (tmp_path / "lock").symlink_to("thesis.txt")
    with pytest.raises(ValueError, match=r"run folder .*: lock: Too many levels of symbolic links"):
        rundir.lock(tmp_path)
    rundir.clean(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-3.lane", "thesis.txt"]
