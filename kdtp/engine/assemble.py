"""Put an engine together: links, fleet, drafter, coordinator, and the handshake that readies its ranks."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from kdtp import draft
from kdtp.engine.coordinator import Coordinator
from kdtp.engine.fleet import Fleet
from kdtp.engine.handshake import Handshake
from kdtp.engine.link import Link, LocalLink
from kdtp.engine.plan import Plan
from kdtp.engine.worker import Worker
from kdtp.model.comm import Solo


def local_link() -> LocalLink:
    """A worker in this process, the only rank of its engine; it has said hello."""
    link = LocalLink(0)
    worker = Worker(0, 1, link.emit, lambda device, timeout: Solo())
    link.handle = worker.handle
    worker.hello()
    return link


def assemble(plan: Plan, links: Sequence[Link]) -> tuple[Coordinator, Handshake]:
    """A coordinator over `links`, to be used once the handshake has advanced to its end."""
    config, golden = plan.config, plan.golden
    fleet = Fleet(links, epoch=secrets.randbits(52), step_timeout=config.step_timeout)
    known = {golden.prompt: golden.tokens} if golden else {}
    drafter = draft.make(config.drafter, known, plan.model.vocab_size)
    return Coordinator(config, plan.model, fleet, drafter), Handshake(fleet, config, os.getpid())
