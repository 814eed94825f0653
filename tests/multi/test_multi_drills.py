"""Ranks on GPUs of their own that are killed or stopped while sums are under way: every client is told in time, no
process and no GPU memory is left, a service comes back by itself. And ranks that part are found out.
"""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from kdtp.messages import Failed, Finished
from kdtp.types import SamplingParams
from tests import apart, parted
from tests.multi.conftest import DEVICE, need_legal
from tests.paths import TINY
from tests.processes import Running, collect, until

pytestmark = [pytest.mark.timeout(120), pytest.mark.apart(90)]
LONG = SamplingParams(max_tokens=490, ignore_eos=True)
MANY = 64  # requests: seconds of work for any GPU
EXIT_FAULT = 70
STEP_TIMEOUT = 3.0
SLACK = 64 << 20  # bytes
USED = """
import torch
print(*(total - free for free, total in (torch.cuda.mem_get_info(i) for i in range(torch.cuda.device_count()))))
"""


def used() -> list[int]:
    """Bytes that are taken on each GPU, as a new process sees it."""
    return [int(word) for word in apart.ask(USED, 30).split()]


@pytest.fixture(scope="module")
def before(gpus: int) -> list[int]:
    """Bytes that others take."""
    return used()


def wait_for_memory(before: list[int]) -> None:
    """Nothing is taken any more that was not before."""
    seen: list[list[int]] = []

    def free() -> bool:
        seen.append(used())
        return all(now <= then + SLACK for now, then in zip(seen[-1], before, strict=True))

    try:
        until(free, 15)
    except AssertionError:
        pytest.fail(f"bytes of GPU memory: {before} before, then {seen}")


def under_way(engine: Running) -> list[int]:
    """Many requests, some of them running."""
    requests = [engine.client.submit((1, 2, 3 + i), LONG) for i in range(MANY)]
    until(lambda: engine.status().step > 20, 30, "steps")
    return requests


def check_end(engine: Running, requests: list[int], words: tuple[str, ...]) -> float:
    """Each request has one terminal event, some that the engine failed; the seconds that took."""
    began = time.monotonic()
    ends = [collect(engine.client, request)[1] for request in requests]
    took = time.monotonic() - began
    failed = [end for end in ends if isinstance(end, Failed)]
    assert failed and all(isinstance(end, Failed | Finished) for end in ends)
    assert all(end.code == "engine" and all(word in end.message for word in words) for end in failed), failed[0]
    assert engine.end(10.0) == EXIT_FAULT
    until(lambda: not engine.left(), 10, f"no process left of {engine.seen}")
    return took


@pytest.mark.parametrize("way", ["push", "base"])
@pytest.mark.parametrize("error", ["skip", "narrow", "turned"])
def test_ranks_that_part(gpus: int, way: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    need_legal(TINY, gpus)
    began = time.monotonic()
    text = parted.fault_of(way, error, gpus, device=DEVICE, graphs=False)
    with capsys.disabled():
        print(f"\n{gpus} GPUs, {way}, {error}: {text[:150]} ({time.monotonic() - began:.1f} s with loading)")
    if error == "turned":
        assert "other collectives" in text or "was in all-reduce" in text


def test_a_service_comes_back(gpus: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package, reason=f"kdtp serve needs {package}")
    from tests.service import Service

    need_legal(TINY, gpus)
    ask = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 20, "temperature": 0.0}
    with Service(tmp_path, "--device", DEVICE, tp=gpus) as service:
        alone = service.post("/v1/completions", **ask)["choices"]
        service.find("worker").kill()
        began = time.monotonic()
        until(lambda: service.health()[0] != 200, 10, "health tells the truth")
        until(lambda: service.health()[0] == 200, 60, "it is back")
        with capsys.disabled():
            print(f"\n{gpus} GPUs: the service is back after {time.monotonic() - began:.1f} s")
        assert service.post("/v1/completions", **ask)["choices"] == alone


def test_nobody_listens_to_other_machines(gpus: int, tmp_path: Path) -> None:
    need_legal(TINY, gpus)
    with Running(tmp_path, "--device", DEVICE, tp=gpus, program=("-m", "tests.odd_engine", "base")) as engine:
        found = [c for p in engine.family() for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert {c.laddr.ip for c in found} <= {"127.0.0.1"}, found


@pytest.mark.parametrize("way", ["push", "base"])
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_a_rank_is_killed_or_stopped(
    gpus: int, before: list[int], way: str, how: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    need_legal(TINY, gpus)
    stop = how == "stopped"
    flags = ("--device", DEVICE, "--step-timeout", STEP_TIMEOUT)
    with Running(tmp_path, *flags, tp=gpus, program=("-m", "tests.odd_engine", way)) as engine:
        victim = psutil.Process(engine.status().worker_pids[-1])
        requests = under_way(engine)
        victim.suspend() if stop else victim.kill()
        name = f"rank {gpus - 1} (pid {victim.pid}"
        took = check_end(engine, requests, (name, "T (stopped)") if stop else (f"{name}) ended",))
        with capsys.disabled():
            print(f"\n{gpus} GPUs, {way}: {how}, all clients told after {took:.2f} s")
        assert took < (STEP_TIMEOUT + 3 if stop else 2.0)
    wait_for_memory(before)


def test_the_launcher_is_killed(gpus: int, before: list[int], tmp_path: Path) -> None:
    need_legal(TINY, gpus)
    with Running(tmp_path, "--device", DEVICE, tp=gpus, program=("-m", "tests.odd_engine", "base")) as engine:
        under_way(engine)
        engine.family()
        engine.launcher.kill()
        until(lambda: not engine.left(), 10, f"no process left of {engine.seen}")
    wait_for_memory(before)
