"""One loaded model, many coordinators over it: drafters and settings change in milliseconds, not by a restart."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import zmq

from kdtp import draft
from kdtp.config import DrafterConfig, EngineConfig
from kdtp.engine import rundir
from kdtp.engine.assemble import local_link
from kdtp.engine.coordinator import Compile, Coordinator
from kdtp.engine.fleet import Fleet
from kdtp.engine.handshake import Handshake
from kdtp.engine.link import Link, ZmqLink
from kdtp.engine.network import placed
from kdtp.engine.plan import plan
from kdtp.engine.request import Request
from kdtp.messages import Finished, Scored, Tokens, Usage
from kdtp.types import Logprob, SamplingParams
from tests.forked import Forked

NONE = DrafterConfig("none")
WORKER = ("-m", "kdtp.engine.worker")


@dataclasses.dataclass
class Done:
    """What one request gave."""

    tokens: list[int]
    usage: Usage
    reason: str
    logits: np.ndarray
    logprobs: list[Logprob]
    scored: list[Logprob]


class Launched:
    """Ranks under the launcher; its lead does nothing."""

    def __init__(self, command: Sequence[str], size: int) -> None:
        lead = "-c 'import signal; signal.pause()'"
        launcher = [sys.executable, "-m", "launcher", "--nproc", str(size), "--lead", lead, "--", *command]
        self._launcher = subprocess.Popen(launcher)

    def poll(self) -> int | None:
        return self._launcher.poll()

    def close(self) -> None:
        self._launcher.send_signal(signal.SIGTERM)
        try:
            self._launcher.wait(10)
        finally:
            self._launcher.kill()  # with whom its ranks end


class Harness:
    """Ranks that are loaded and ready: one in this process, or several, forked or (on GPUs) under the launcher.

    worker: what each process runs; step_timeout: 60 s unless it is among the settings.
    """

    def __init__(self, model: Path, tp: int = 1, worker: Sequence[str] = WORKER, **settings: object) -> None:
        settings = {"threads": 1, "step_timeout": 60.0} | settings
        self.plan = plan(EngineConfig(str(model), tp=tp, **settings))  # type: ignore[arg-type]
        self.config = self.plan.config
        self.compile: Compile | None = None  # of grammars
        self.context = zmq.Context()
        self.folder = rundir.create()
        self.ranks: Forked | Launched | None = None
        self.links: list[Link] = [local_link()] if tp == 1 else self._spawn(tp, worker)
        self.fleet = Fleet(self.links, 1, self.config.step_timeout, busy=self.config.busy_wait == "on")
        handshake = Handshake(self.fleet, self.config, os.getpid())
        while not handshake.advance(0.5):
            assert self.ranks is None or self.ranks.poll() is None, "the ranks ended while loading"

    def _spawn(self, tp: int, worker: Sequence[str]) -> list[Link]:
        links: list[Link] = [ZmqLink(self.context, self.folder, rank) for rank in range(tp)]
        start = Forked if self.config.device == "cpu" else Launched
        self.ranks = start([*worker, "--run-dir", str(self.folder)], tp)
        return links

    def coordinator(self, drafter: DrafterConfig = NONE, known: Mapping | None = None, **settings) -> Coordinator:
        """A fresh coordinator over the loaded ranks."""
        config = dataclasses.replace(self.config, drafter=drafter, **settings)
        network, on_gpu = placed(config, self.fleet), config.device == "cuda"
        made = draft.make(drafter, known or {}, self.plan.model.vocab_size, network, on_gpu)
        coordinator = Coordinator(config, self.plan.model, self.fleet, made, self.compile)
        coordinator.start()
        return coordinator

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams],
        drafter: DrafterConfig = NONE,
        known: Mapping | None = None,
        given: Sequence[Sequence[int]] = (),
        **settings,
    ) -> list[Done]:
        """All prompts at once, to their ends, with logits; given: what each has emitted before."""
        coordinator = self.coordinator(drafter, known, **settings)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        tokens = [list(text) for text in given] or [[] for _ in prompts]
        for i, (prompt, p) in enumerate(zip(prompts, each, strict=True)):
            coordinator.submit(Request(i, tuple(prompt), p, True, True, tokens=list(tokens[i])))
        rows: list[list[bytes]] = [[] for _ in prompts]
        logprobs: list[list[Logprob]] = [[] for _ in prompts]
        scored: list[list[Logprob]] = [[] for _ in prompts]
        ends: dict[int, Finished] = {}
        while not coordinator.idle:
            for event in coordinator.step():
                message = event.message
                assert message.request is not None
                if isinstance(message, Tokens):
                    assert message.position == len(tokens[message.request])
                    tokens[message.request] += message.tokens
                    rows[message.request].append(event.logits or b"")
                    logprobs[message.request] += message.logprobs
                elif isinstance(message, Scored):
                    assert message.position == len(scored[message.request]) + 1 and not tokens[message.request]
                    scored[message.request] += message.logprobs
                else:
                    assert isinstance(message, Finished), message
                    ends[message.request] = message
        assert coordinator.pool.free == coordinator.pool.total
        found = zip(tokens, rows, logprobs, scored, strict=True)
        return [
            Done(text, ends[i].usage, ends[i].reason, self._logits(raw), told, prompt)
            for i, (text, raw, told, prompt) in enumerate(found)
        ]

    def _logits(self, rows: list[bytes]) -> np.ndarray:
        return np.frombuffer(b"".join(rows), np.float32).reshape(-1, self.plan.model.vocab_size)

    def close(self) -> None:
        self.fleet.dismiss("test over")
        self.fleet.close()
        if self.ranks is not None:
            self.ranks.close()
        self.context.destroy(0)
        rundir.remove(self.folder)
