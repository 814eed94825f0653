"""The coordinator of bench_gap.py on several ranks: python scripts/gap_lead.py NOTES RUN-DIR CONFIG TOKENS

It runs a completion three times: unnoticed, for the host's clocks, and with what the GPUs run (gap_rank.py notes it),
and leaves the numbers of the second one's steps in NOTES/steps.json.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import zmq  # noqa: E402

from kdtp.config import EngineConfig, build  # noqa: E402
from kdtp.engine import guard  # noqa: E402
from kdtp.engine.assemble import assemble  # noqa: E402
from kdtp.engine.coordinator import Coordinator  # noqa: E402
from kdtp.engine.link import ZmqLink  # noqa: E402
from kdtp.engine.plan import plan  # noqa: E402
from kdtp.engine.request import Request  # noqa: E402
from kdtp.types import SamplingParams  # noqa: E402
from scripts import gap_rank  # noqa: E402

PROMPT = tuple(range(1, 9)) * 2


def complete(coordinator: Coordinator, label: int, tokens: int) -> tuple[int, int]:
    """One completion; the numbers of its first and last step."""
    first = coordinator.fleet.step + 1
    coordinator.submit(Request(label, PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True), salt=str(label)))
    while not coordinator.idle:
        coordinator.step()
    return first, coordinator.fleet.step


def main() -> int:
    """Run it."""
    notes, folder, config, tokens = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]), int(sys.argv[4])
    guard.end_with_parent(os.getppid())
    guard.dump_stacks_on_signal()
    checked = plan(build(EngineConfig, config, "bench_gap"))
    tp = checked.config.tp
    links = [ZmqLink(zmq.Context.instance(), folder, rank) for rank in range(tp)]
    coordinator, handshake = assemble(checked, links)
    while not handshake.advance(0.5):
        pass
    complete(coordinator, 1, tokens)
    steps = complete(coordinator, 2, tokens)
    (notes / gap_rank.PROFILE).touch()
    complete(coordinator, 3, tokens)
    coordinator.fleet.dismiss("measured")
    until = time.monotonic() + gap_rank.PATIENCE
    while not gap_rank.all_left(notes, tp):
        if time.monotonic() > until:
            print("bench_gap: a rank has left no notes", file=sys.stderr)
            return 1
        time.sleep(0.05)
    (notes / "steps.json").write_text(json.dumps(steps))
    return 0


if __name__ == "__main__":
    guard.leave(main())
