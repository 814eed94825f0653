"""What an engine says of itself: Status, but for what is one client's own."""

from __future__ import annotations

import os

from kdtp.engine.coordinator import Coordinator
from kdtp.engine.plan import Plan
from kdtp.messages import Status
from kdtp.version import __version__


def picture(plan: Plan, coordinator: Coordinator, state: str, loaded: tuple[int, int]) -> Status:
    """An engine as it is now; loaded: bytes of weights that are there, and of all."""
    config, scheduler, fleet, pool = plan.config, coordinator.scheduler, coordinator.fleet, coordinator.pool
    counters = coordinator.totals() + fleet.dropped()
    counters["desync_checks"] = fleet.desync_checks
    counters["desync_failures"] = fleet.desync_failures
    return Status(
        upto=0,
        open=(),
        state=state,
        pid=os.getpid(),
        version=__version__,
        tp=config.tp,
        step=fleet.step,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        pages_total=pool.total,
        waiting_tokens=scheduler.waiting_tokens,
        pages_free=pool.free,
        pages_idle=pool.idle,
        load_done=loaded[0],
        load_total=loaded[1],
        worker_pids=tuple(link.hello.pid for link in fleet.links if link.hello),
        counters=dict(counters),
        model=config.model,
        vocab_size=plan.model.vocab_size,
        max_positions=plan.model.max_position_embeddings,
        stage_ms={stage: round(seconds * 1e3, 3) for stage, seconds in coordinator.seconds.items()},
        accepted=tuple(coordinator.accepted[n] for n in range(max(coordinator.accepted, default=-1) + 1)),
        tallies={name: dict(counts) for name, counts in coordinator.tallies.items()},
        step_ages=tuple(round(age, 3) for age in fleet.step_ages()),
        patience=config.stall_timeout if state == "loading" else config.step_timeout,
    )
