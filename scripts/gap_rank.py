"""A worker that notes when it takes a step and when it has its ids: python scripts/gap_rank.py NOTES --run-dir DIR ...

NOTES: a folder. When it is dismissed it leaves `rank-R.json` there: `steps`, of each with rows its number and three
times in nanoseconds of the machine's monotonic clock (taken, launched, ids on the host), and `spans`, what its GPU ran
since the file `profile` was there, as bench_gap's Span.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from kdtp.engine import guard, worker  # noqa: E402
from kdtp.engine.link import Payload  # noqa: E402
from kdtp.messages import Forward, FromWorker, Shutdown, ToWorker  # noqa: E402
from kdtp.model.comm import Comm  # noqa: E402
from kdtp.model.shard import Shard  # noqa: E402
from kdtp.types import SeqRows  # noqa: E402
from scripts.gpu_time import spans_of  # noqa: E402

PROFILE = "profile"
PATIENCE = 60.0  # seconds for a rank to leave its notes
Plain = worker.Worker


class TimedShard(Shard):
    """Knows when its last forward was launched."""

    launched = 0

    def forward(self, seqs: Sequence[SeqRows]) -> torch.Tensor:
        """As Shard."""
        logits = super().forward(seqs)
        TimedShard.launched = time.monotonic_ns()
        return logits


class TimedWorker(Plain):
    """As Worker."""

    folder = Path()

    def __init__(self, rank: int, size: int, emit: worker.Emit, connect: Callable[[str, float], Comm]) -> None:
        super().__init__(rank, size, self._noted, connect)
        self._send, self._taken = emit, 0
        self._steps: list[tuple[int, int, int, int]] = []
        self._profile: torch.profiler.profile | None = None

    def handle(self, message: ToWorker) -> None:
        """As Worker, with notes."""
        self._taken = time.monotonic_ns()
        if isinstance(message, Forward) and message.seqs:
            if self._profile is None and torch.cuda.is_available() and (self.folder / PROFILE).exists():
                self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self._profile.start()
            super().handle(message)
            return
        super().handle(message)
        if isinstance(message, Shutdown):
            self._leave_notes()

    def _noted(self, message: FromWorker, frame: Payload) -> None:
        if isinstance(message, worker.Ids) and message.ids:
            self._steps.append((message.step, self._taken, TimedShard.launched, time.monotonic_ns()))
        self._send(message, frame)

    def _leave_notes(self) -> None:
        spans = []
        if self._profile is not None:
            self._profile.stop()
            spans = spans_of(self._profile)
        path = self.folder / f"rank-{self.rank}.json"
        path.with_suffix(".part").write_text(json.dumps({"steps": self._steps, "spans": spans}))
        path.with_suffix(".part").rename(path)
        until = time.monotonic() + PATIENCE
        while not all_left(self.folder, self.size) and time.monotonic() < until:
            time.sleep(0.02)  # who ends first gives the others little time


def all_left(folder: Path, size: int) -> bool:
    """Whether every rank has left its notes."""
    return all((folder / f"rank-{rank}.json").exists() for rank in range(size))


if __name__ == "__main__":
    guard.end_with_parent(os.getppid())
    guard.dump_stacks_on_signal()
    TimedWorker.folder = Path(sys.argv[1])
    worker.Worker = TimedWorker  # type: ignore[misc]
    worker.Shard = TimedShard  # type: ignore[misc]
    guard.leave(worker.main(sys.argv[2:]))
