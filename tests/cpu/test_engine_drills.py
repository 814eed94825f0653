"""Failure drills with real processes: each open request gets one terminal event in time, and nothing is left."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import psutil
import pytest
import zmq

from kdtp.config import EngineConfig
from kdtp.engine import rundir
from kdtp.engine.plan import plan
from kdtp.engine.rpc import Client, EngineDead
from kdtp.messages import Failed, Finished, Submit, Tokens
from kdtp.types import SamplingParams
from tests.dflash import drafter_folder, spoilt
from tests.dflash_cases import V1
from tests.processes import REFS, TINY, Running, collect, hears, kdtp, until

LONG = SamplingParams(max_tokens=490, ignore_eos=True)
EXIT_FAULT = 70
pytestmark = pytest.mark.timeout(180)
SHARED = pytest.mark.xdist_group("shared-engine")  # by the tests that an engine outlives


def golden():
    return plan(EngineConfig(str(TINY))).golden


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with Running(tmp_path_factory.mktemp("shared"), "--drafter", "oracle", "--ping-interval", 0.5) as engine:
        yield engine


def start_long(engine: Running, count: int = 1) -> list[int]:
    """Requests under way: each has emitted something."""
    requests = [engine.client.submit((1, 2, 3 + i), LONG) for i in range(count)]
    until(lambda: engine.status().running == count, 20, "requests running")
    until(lambda: engine.status().step > 4, 20, "steps")
    return requests


def terminal(client: Client, request: int):
    """The terminal event, and the seconds from now until it came."""
    started = time.monotonic()
    messages = [message for message, _ in client.events(request)]
    ends = [m for m in messages if not isinstance(m, Tokens)]
    assert len(ends) == 1 and ends[0] is messages[-1]
    return ends[0], time.monotonic() - started


def check_gone(engine: Running, seconds: float = 20.0) -> None:
    until(lambda: not engine.left(), seconds, f"no process left of {engine.seen}")


def test_worker_killed(tmp_path):
    with Running(tmp_path) as engine:
        requests = start_long(engine, 3)
        victim = engine.find("worker", 1)
        victim.kill()
        killed = time.monotonic()
        for request in requests:
            end, _ = terminal(engine.client, request)
            assert isinstance(end, Failed) and end.code == "engine"
            assert f"rank 1 (pid {victim.pid}) ended" in end.message
        assert time.monotonic() - killed < 8.0, "before the step's deadline"
        assert engine.end() == EXIT_FAULT
        check_gone(engine)
        assert f"rank 1 (pid {victim.pid}) was killed by SIGKILL" in engine.text()


def test_worker_killed_while_idle(tmp_path):
    with Running(tmp_path) as engine:
        engine.find("worker", 0).kill()
        assert engine.end() == EXIT_FAULT
        check_gone(engine)


@pytest.mark.parametrize("idle", [False, True])
def test_worker_stopped(tmp_path, idle):
    with Running(tmp_path, "--step-timeout", 1.5, "--ping-interval", 0.5) as engine:
        requests = [] if idle else start_long(engine, 2)
        victim = engine.find("worker", 0)
        victim.suspend()
        stopped = time.monotonic()
        for request in requests:
            end, _ = terminal(engine.client, request)
            assert isinstance(end, Failed) and "rank 0" in end.message and "T (stopped)" in end.message
            assert time.monotonic() - stopped < 20.0, "a busy machine's deadline is 10 times what a step takes there"
        if idle:  # a client that asks all the time keeps nobody from looking after the ranks
            with pytest.raises(EngineDead):
                while time.monotonic() < stopped + 20.0:
                    engine.status()
                    time.sleep(0.05)
        assert engine.end() == EXIT_FAULT
        check_gone(engine)
        # Stacks of all ranks, the stopped one's too.
        stacks = re.findall(r"(?:Current thread|Thread) 0x\w+ \[?.*most recent call first", engine.text())
        assert len(stacks) >= 2, engine.text()
        assert engine.text().count("in serve") >= 2, engine.text()


@pytest.mark.parametrize("stopped", [False, True])
def test_worker_that_drafts_is_lost(tmp_path, stopped):
    """In a forward or in a draft, which rank 0 alone answers: rank 1 is named. All wait busily."""
    model = EngineConfig(str(TINY))
    folder = drafter_folder(tmp_path / "drafter", V1, plan(model).model)
    drafter = ("--drafter", "dflash", "--drafter-model", folder, "--drafter-placement", "workers")
    with Running(tmp_path, "--step-timeout", 1.5, "--busy-wait", "on", *drafter) as engine:
        (request,) = start_long(engine)
        victim = engine.find("worker", 1)
        victim.suspend() if stopped else victim.kill()
        end, seconds = terminal(engine.client, request)
        assert isinstance(end, Failed) and end.code == "engine" and "rank 1" in end.message
        assert ("T (stopped)" if stopped else f"pid {victim.pid}) ended") in end.message
        assert seconds < 20.0 and engine.end() == EXIT_FAULT
        check_gone(engine)


def test_a_rank_that_cannot_load_says_why(tmp_path):
    """To the user, not to the log alone. The first rank's part is sound; it fails in what it does with the other."""
    folder = drafter_folder(tmp_path, V1, plan(EngineConfig(str(TINY))).model)
    said = spoilt(folder, "layers.1.mlp.up_proj.weight")
    drafter = ("--drafter", "dflash", "--drafter-model", folder, "--drafter-placement", "workers")
    done = kdtp("generate", "--model", TINY, "--tp", 2, *drafter)
    *_, last = done.stderr.splitlines()
    assert done.returncode == EXIT_FAULT and last.startswith("kdtp generate: ") and "rank 1 failed" in last
    assert said in last


def test_coordinator_killed(tmp_path):
    with Running(tmp_path) as engine:
        start_long(engine)
        stranger = Client(engine.address)  # knows nothing of the launcher
        stranger.status(10)
        engine.find("host").kill()
        with pytest.raises(EngineDead, match="ended"):
            list(stranger.events(stranger.submit((1,), LONG)))
        stranger.close()
        assert engine.end() == 1
        check_gone(engine)
        assert "the lead" in engine.text() and "SIGKILL" in engine.text()


@pytest.mark.parametrize(("tp", "ready"), [(2, False), (1, True), (2, True)])
def test_launcher_killed(tmp_path, tp, ready):
    with Running(tmp_path, tp=tp, wait=ready) as engine:
        if ready:
            start_long(engine)
        else:  # while its children import torch
            until(lambda: len(engine.launcher.children()) >= 3, 30)
        engine.family()
        engine.launcher.kill()
        check_gone(engine)


def test_told_to_end_while_generating_under_a_flood(tmp_path):
    """By a hangup; by Ctrl-C in test_cli_generate.py."""
    with Running(tmp_path) as engine:
        requests = start_long(engine, 2)
        folder = engine.address.removeprefix("ipc://").rpartition("/")[0]
        code = f"""
import zmq
sockets = [zmq.Context.instance().socket(zmq.DEALER) for _ in range(3)]
for socket, name in zip(sockets, ("rpc", "rank-0", "rank-1")):
    socket.connect(f"ipc://{folder}/{{name}}.ipc")
while True:
    for socket in sockets:
        socket.send(b"\\xc1")
"""
        flood = subprocess.Popen([sys.executable, "-c", code])
        try:
            step = engine.status().step
            until(lambda: engine.status().step > step + 3, 20, "rounds under the flood")
            engine.process.send_signal(signal.SIGHUP)
            for request in requests:
                end, _ = terminal(engine.client, request)
                assert isinstance(end, Failed) and end.code == "shutdown"
            assert engine.end() == 0
        finally:
            flood.kill()
            flood.wait()
        check_gone(engine)
        assert "Traceback" not in engine.text()
        assert len(engine.text()) < 100_000, "a line for every frame"


@pytest.mark.parametrize(
    ("number", "processes", "after"),
    [
        (signal.SIGTERM, 1, 0.0),
        (signal.SIGINT, 1, 0.0),
        (signal.SIGINT, 1, 1.0),  # it imports torch
        (signal.SIGTERM, 4, 0.0),
        (signal.SIGINT, 4, 1.5),  # the others do
    ],
)
def test_told_to_end_while_starting(tmp_path, number, processes, after):
    with Running(tmp_path, wait=False) as engine:
        until(lambda: hears(engine.launcher, signal.SIGTERM), 20, "the first lines of `kdtp engine`")
        until(lambda: len(engine.family()) >= processes, 60, "processes")
        time.sleep(after)
        engine.family()
        engine.process.send_signal(number)
        assert engine.end() == 0, engine.text()  # a library that is being loaded is waited for
        check_gone(engine)
        assert "Traceback" not in engine.text()


@SHARED
def test_hostile_frames_are_counted_and_harmless(shared):
    engine = shared
    with zmq.Context() as context:
        folder = engine.address.removeprefix("ipc://").rpartition("/")[0]
        request = engine.client.submit((1, 2, 3), SamplingParams(max_tokens=200, ignore_eos=True))
        wire = [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"x" * (17 << 20)]
        wire.append(msgspec.msgpack.encode({"type": "Submit", "request": 1, "prompt": [], "params": {}}))
        wire.append(msgspec.msgpack.encode({"type": "Fault", "epoch": 1, "step": 1, "rank": 0, "text": "I am rank 0"}))
        for name in ("rpc", "rank-0", "rank-1"):
            dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.LINGER, 20_000)  # what comes behind the oversized one goes by another connection
            dealer.connect(f"ipc://{folder}/{name}.ipc")
            for frame in wire:
                dealer.send(frame)
            dealer.close()
        for rank in (0, 1):
            with socket.socket(socket.AF_UNIX) as lane:
                lane.connect(str(rundir.lane(Path(folder), rank)))
                with contextlib.suppress(ConnectionError):  # it may be closed while this one speaks
                    lane.sendall(b"".join(wire[:4]))
        tokens, end = collect(engine.client, request)
        assert isinstance(end, Finished) and len(tokens) == 200
        # An idle engine reads the ranks' when it pings them.
        least = {"malformed_rpc": 5, "malformed": 6, "stranger": 4}

        def counted() -> bool:
            counters = engine.status().counters
            return all(counters.get(name, 0) >= count for name, count in least.items())

        until(counted, 20)
        assert engine.status().counters["stranger"] == 4


@SHARED
def test_clients_share_an_engine(shared):
    engine, truth = shared, golden()
    clients = [engine.client, engine.connect(), engine.connect()]
    params = SamplingParams(max_tokens=24)
    requests = [client.submit(truth.prompt, params) for client in clients for _ in range(2)]
    long = clients[1].submit((5, 6), LONG)
    leaver = engine.connect()
    leaver.submit((7, 8), LONG)
    for client, request in zip([c for c in clients for _ in range(2)], requests, strict=True):
        assert collect(client, request)[0] == list(truth.tokens)
    clients[1].cancel(long)
    assert collect(clients[1], long)[1].reason == "cancelled"
    leaver.close()  # its request is cancelled when the engine cannot reach it
    until(lambda: engine.status().running == 0, 20)
    status = engine.status()
    assert status.pages_free == status.pages_total and status.counters["unreachable_client"] >= 1
    bad = clients[2].submit((1,) * 600, params)
    assert collect(clients[2], bad)[1].code == "invalid"
    raw = zmq.Context.instance().socket(zmq.DEALER)
    raw.connect(engine.address)
    for _ in range(2):
        raw.send(msgspec.msgpack.encode(Submit(7, (1, 2), LONG)))
    until(lambda: b"open request" in raw.recv(), 20)
    raw.close(0)


@SHARED
def test_a_second_engine_disturbs_nothing(shared, tmp_path):
    """Nor does it take away what is the user's in its run folder, when a client asks for its end."""
    folder = shared.address.removeprefix("ipc://").rpartition("/")[0]
    taken = kdtp("engine", "--model", TINY, "--run-dir", folder)
    assert taken.returncode == 2 and "another engine runs in it" in taken.stderr
    mine = tmp_path / "mine"
    mine.mkdir(mode=0o700)
    (mine / "thesis.txt").write_text("years of work")
    with Running(tmp_path, "--run-dir", mine) as second:
        assert second.address == rundir.endpoint(mine, "rpc") and len(second.family()) == 4
        params = SamplingParams(max_tokens=24)
        texts = [collect(e.client, e.client.submit(golden().prompt, params))[0] for e in (shared, second)]
        assert texts[0] == texts[1] == list(golden().tokens)
        second.client.shutdown()
        assert second.end() == 0
        check_gone(second)
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    assert shared.status().state == "ready"


@SHARED
def test_listening_sockets_are_on_loopback(shared):
    sockets = [c for p in shared.family() for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert sockets, "gloo listens somewhere"
    assert {c.laddr.ip for c in sockets} == {"127.0.0.1"}


def test_workers_under_torchrun(tmp_path):
    folder = rundir.create()
    config = plan(EngineConfig(str(TINY), tp=2, threads=1)).config
    settings = msgspec.json.encode(config.mapping()).decode()
    host = subprocess.Popen([sys.executable, "-m", "kdtp.engine.host", "--run-dir", folder, "--config", settings])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ranks = subprocess.Popen([*torchrun, "-m", "kdtp.engine.worker", "--run-dir", folder], stderr=subprocess.PIPE)
    client = Client(rundir.endpoint(folder, "rpc"))
    try:
        until(lambda: client.status(60).state == "ready", 60)
        assert collect(client, client.submit(golden().prompt, SamplingParams(max_tokens=24)))[0] == list(
            golden().tokens
        )
        client.shutdown()
        assert host.wait(20) == 0
        assert ranks.wait(20) == 0
    finally:
        for process in (host, ranks):
            process.kill()
            process.wait()
        client.close()
        rundir.remove(folder)


def test_refusals_before_anything_starts(tmp_path):
    """All in one process: `kdtp engine` does not come back once it has started something."""
    refused = (
        (["--tp", "3"], ["tp = 3", "1, 2, 4"]),
        (["--device", "cuda"], ["device = 'cuda'", "cpu"]),
        (["--drafter", "magic"], ["drafter = 'magic'", "none, oracle, ngram"]),
        (["--model", str(tmp_path / "no.kdtr")], ["no.kdtr", "no such file"]),
        (["--block", "0"], ["block = 0", "1..65"]),
        (["--dtype", "int8"], ["dtype = 'int8'", "float32"]),
    )
    asked = [["engine", "--model", str(TINY), *flags] for flags, _ in refused]
    code = f"from kdtp.__main__ import main\nprint([main(flags) for flags in {asked}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == f"{[2] * len(refused)}\n", done.stderr
    for line, (_, words) in zip(done.stderr.splitlines(), refused, strict=True):
        assert all(word in line for word in words), line
    assert REFS.is_dir()
