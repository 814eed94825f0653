"""The jobs in one engine: from its start to its death, after which another session goes on with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Container

from kdtp.engine.rpc import Client
from kdtp.messages import Failed, Finished, FromEngine, Refused
from kdtp.server.journal import Job, Told
from kdtp.watch import Round

_LEASE = 16  # rounds of a watched job that are asked for at once
_SOONEST, _LATEST = 0.2, 5.0  # seconds until a refused job is tried again


class Session:
    """Submits jobs to an engine and tells what comes of them. EngineDead, from the client, ends it.

    wanted: jobs that nobody has cancelled; context: tokens of the model's longest text. `fault`: what the engine said
    of its own end.
    """

    def __init__(
        self, client: Client, wanted: Container[Job], context: int, tell: Callable[[Job, Told | Round], object]
    ) -> None:
        self._client = client
        self._wanted, self._context, self._tell = wanted, context, tell
        self.fault = ""
        self._labels: dict[int, Job] = {}
        self._leases: dict[int, int] = {}  # label: rounds that are still to come
        self._later: list[tuple[float, Job]] = []  # accepted by an engine before, refused by this one now

    def start(self, job: Job) -> None:
        """Give a job to the engine, with what it has emitted elsewhere."""
        if job not in self._wanted or self._labels.get(job.label or 0) is job:
            return
        finished = job.finished(self._context)
        if finished is not None:
            self._tell(job, finished)
            return
        job.label = self._client.submit(
            job.prompt,
            job.params,
            job.extra.speculate,
            budget=job.extra.budget,
            priority=job.extra.priority,
            salt=job.extra.salt,
            given=job.given,
        )
        self._labels[job.label] = job
        self.watch(job)

    def watch(self, job: Job) -> None:
        """Have the rounds of a job shown, some at a time, as long as somebody looks."""
        label = job.label
        if not job.watchers or label is None or self._labels.get(label) is not job:
            return
        if self._leases.get(label, 0) <= _LEASE // 2:
            self._leases[label] = _LEASE
            self._client.watch(label, _LEASE)

    def cancel(self, job: Job) -> None:
        """End a job here."""
        if job.label is not None and self._labels.get(job.label) is job:
            self._drop(job.label)

    def turn(self, seconds: float) -> None:
        """Take what has come; wait for it at most so long."""
        for label, message, _ in self._client.poll(self._labels, seconds):
            job = self._labels.get(label)
            if job is not None:
                self._take(job, label, message)
        now = time.monotonic()
        for entry in [entry for entry in self._later if entry[0] <= now]:
            self._later.remove(entry)
            self.start(entry[1])

    def _take(self, job: Job, label: int, event: FromEngine) -> None:
        if isinstance(event, Round):
            self._leases[label] = self._leases.get(label, 1) - 1
            self._tell(job, event)
            self.watch(job)
            return
        told = job.note(event)
        if not isinstance(told, Finished | Failed | Refused):
            if told is not None:
                self._tell(job, told)
            return
        if told is event:
            del self._labels[label]
            self._leases.pop(label, None)
        else:  # our own verdict: the engine does not know of it
            self._drop(label)
        if isinstance(told, Failed) and told.code in ("engine", "shutdown"):
            # The engine is about to end, or could not tell us of this job: it goes on in the next one, or in this.
            self.fault = told.message
            self.start(job)
        elif isinstance(told, Refused) and job.accepted:
            self._later.append((time.monotonic() + min(max(told.retry_after, _SOONEST), _LATEST), job))
        else:
            self._tell(job, told)

    def _drop(self, label: int) -> None:
        del self._labels[label]
        self._leases.pop(label, None)
        self._client.cancel(label)
        self._client.forget(label)
