"""Starts the ranks of tests/reduce_rank.py, and says what must be true of what they found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.reduce_rank import DEADLINE

Found = list[dict[str, Any]]  # of each rank: what each task found, by its name


def run(size: int, backend: str, folder: Path, seconds: float) -> Found:
    """Run all ranks to their end. Raises AssertionError with the words of those that failed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    environment |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}  # no NVLink multicast
    ranks = [_start(rank, size, backend, folder, environment) for rank in range(size)]
    try:
        codes = [process.wait(seconds) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    words = [(folder / f"{rank}.err").read_text()[-3000:] for rank in range(size)]
    assert codes == [0] * size, "\n".join(words)
    return [_read(folder / f"{rank}.out") for rank in range(size)]


def _start(rank: int, size: int, backend: str, folder: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.reduce_rank", str(rank), str(size), backend]
    with (folder / f"{rank}.out").open("wb") as out, (folder / f"{rank}.err").open("wb") as err:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err)


def _read(path: Path) -> dict[str, Any]:
    return {line["task"]: line["found"] for line in map(json.loads, path.read_text().splitlines())}


def check_sums(found: Found, task: str) -> None:
    """Every sum of every rank was right."""
    for rank in found:
        assert rank[task]["rounds"] > 0
        assert rank[task]["wrong"] == 0, found


def check_unlike(found: Found) -> None:
    """All ranks see at once that their calls do not fit; the first to see it names the rank, later ones its wake."""
    texts = [rank["unlike"]["error"] for rank in found]
    assert all(text is not None and "was in all-reduce" in text for text in texts), texts
    assert any("rank 1 was in" in text for rank, text in enumerate(texts) if rank != 1), texts
    assert all(rank["unlike"]["seconds"] < 10 for rank in found), found


def check_gone(found: Found) -> None:
    """The ranks that are left name the one that has ended, once its time is up; and no later call waits again."""
    for rank, others in enumerate(found):
        if rank != 1:
            text = others["gone"]["error"]
            assert text is not None and text.endswith(f": nothing from rank 1 within {DEADLINE:g} s"), text
            assert 0.5 * DEADLINE < others["gone"]["seconds"] < 3 * DEADLINE, found
