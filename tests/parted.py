"""What must come of ranks that part: the engine ends in time, and no token of that step or a later one is told."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kdtp.engine.link import EngineFault
from kdtp.engine.request import Request
from kdtp.types import SamplingParams
from tests.harness import Harness
from tests.paths import TINY

STEP_TIMEOUT = 5.0  # the first step loads kernels
STEPS = 3  # that are well


def worker(way: str, error: str = "none", at: int = 0) -> list[str]:
    """The worker's command; see tests/odd_rank.py."""
    return ["-m", "tests.odd_rank", way, error, str(at)]


def fault_of(way: str, error: str, tp: int, layers: int = 4, model: Path = TINY, **settings: object) -> str:
    """Rank 1 of a model with so many layers errs in the step behind STEPS others: the fault's text."""
    odd = worker(way, error, STEPS * 2 * layers + 4)
    harness = Harness(model, tp, odd, step_timeout=STEP_TIMEOUT, **settings)
    try:
        golden = harness.plan.golden
        assert golden is not None and harness.plan.model.num_hidden_layers == layers
        coordinator = harness.coordinator()
        coordinator.submit(Request(0, golden.prompt, SamplingParams(max_tokens=24)))
        told: list[int] = []
        began = time.monotonic()
        with pytest.raises(EngineFault) as fault:
            while not coordinator.idle:
                for event in coordinator.step():
                    told += getattr(event.message, "tokens", ())
        assert time.monotonic() - began < STEP_TIMEOUT + 3
        assert told == list(golden.tokens[:STEPS])
        return str(fault.value)
    finally:
        harness.close()
