"""Put an engine together: links, fleet, drafter, coordinator, and the handshake that readies its ranks."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Sequence

from kdtp import draft
from kdtp.engine.coordinator import Coordinator
from kdtp.engine.fleet import Fleet
from kdtp.engine.handshake import Handshake
from kdtp.engine.link import Link, LocalLink, Payload
from kdtp.engine.plan import Plan
from kdtp.grammar import Grammars
from kdtp.messages import FromWorker, Progress


def local_link(on_progress: Callable[[int, int], None] = lambda done, total: None) -> LocalLink:
    """A worker in this process, the only rank of its engine; it has said hello.

    on_progress: told bytes loaded and to load while it loads, when nobody can receive yet.
    """
    from kdtp.engine.worker import Worker  # torch: a coordinator of other processes does without
    from kdtp.model.comm import Solo

    link = LocalLink(0)

    def emit(message: FromWorker, frame: Payload) -> None:
        link.emit(message, frame)
        if isinstance(message, Progress):
            on_progress(message.done, message.total)

    alone = Worker(0, 1, emit, lambda device, timeout: Solo())
    link.handle = alone.handle
    alone.hello()
    return link


def assemble(plan: Plan, links: Sequence[Link], serves: bool = False) -> tuple[Coordinator, Handshake]:
    """A coordinator over `links`, to be used once the handshake has advanced to its end.

    serves: for many requests, so what the first of a kind would wait for is made ready while the model is loaded.
    """
    config, golden = plan.config, plan.golden
    fleet = Fleet(links, epoch=secrets.randbits(52), step_timeout=config.step_timeout, busy=config.busy_wait == "on")
    known = {golden.prompt: golden.tokens} if golden else {}
    on_gpu = config.device == "cuda"
    network = None
    if config.drafter.network:
        from kdtp.engine.network import placed  # torch, too

        network = placed(config, fleet)
    drafter = draft.make(config.drafter, known, plan.model.vocab_size, network, on_gpu)
    grammars = Grammars(config.tokenizer or config.model, plan.model.vocab_size, plan.model.eos_token_ids)
    if serves:
        threading.Thread(target=grammars.prepare, daemon=True).start()
    coordinator = Coordinator(config, plan.model, fleet, drafter, grammars.compile)
    return coordinator, Handshake(fleet, config, os.getpid(), coordinator.start)
