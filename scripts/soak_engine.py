"""Random requests, steps and aborts against the coordinator alone, many times over; nothing may be left behind.

    python scripts/soak_engine.py [--requests 100000] [--seed 10000]

The storm of tests/cpu/test_engine_scheduler.py, over a target whose rows are its tokens: pools too small for all,
prefix hits, preemptions, priorities, drafts of every kind. Every text is compared with what it must be; pages and
books are looked at every 100 operations and at each end. About 500 requests a second.
"""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "cpu")]

from test_engine_scheduler import Storm, check_empty  # noqa: E402

_OPERATIONS = 3000  # of one engine


def run(seed: int) -> Storm:
    """One engine's life."""
    storm = Storm(seed)
    for number in range(_OPERATIONS):
        storm.rng.choices((storm.submit, storm.step, storm.abort), (3, 10, 2))[0]()
        if number % 100 == 0:
            storm.check()
    while storm.open:
        storm.step()
    check_empty(storm.coordinator, storm.workers)
    return storm


def main() -> int:
    """Run engines until there were enough requests, and say what they met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=10_000)
    chosen = parser.parse_args()
    logging.getLogger("kdtp").setLevel(logging.ERROR)  # random drafts are often not accepted
    started, seed, met = time.monotonic(), chosen.seed, Counter[str]()
    while met["submitted"] < chosen.requests:
        storm = run(seed)
        seed += 1
        met += Counter(submitted=storm.count, refused=storm.refused) + storm.coordinator.totals()
        if (seed - chosen.seed) % 20 == 0:
            print(f"{met['submitted']} requests, {_memory()} MB", flush=True)
    names = ("submitted", "refused", "preemptions", "prefix_hits", "prefix_evictions", "accepted")
    print(", ".join(f"{name} {met[name]}" for name in names), f"in {time.monotonic() - started:.0f} s, {_memory()} MB")
    return 0


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10


if __name__ == "__main__":
    sys.exit(main())
