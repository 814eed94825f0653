"""The engine behind the endpoint: a thread that starts it, talks with it, and starts it again when it has died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from kdtp.engine.child import Child
from kdtp.engine.plan import Plan
from kdtp.engine.rpc import Client, EngineDead
from kdtp.log import logger
from kdtp.messages import Failed, Finished, Refused, Status
from kdtp.server.errors import busy, gone
from kdtp.server.journal import Job, Told
from kdtp.server.metrics import Metrics
from kdtp.server.session import Session
from kdtp.server.watcher import Watcher
from kdtp.watch import Round

TOLD_TO_END = "the server was told to end"
_ASK = 1.0  # seconds between two looks at the engine's status
_MOMENT = 0.2
_MOST_DEATHS = 2  # at least, that a job may see: it may be what engines die of


@dataclass(frozen=True)
class Health:
    """state: loading, ready, restarting, draining or dead. done, total: bytes loaded; restarts: engines that died."""

    state: str = "loading"
    reason: str = ""
    done: int = 0
    total: int = 0
    restarts: int = 0


class Driver:
    """Runs jobs in an engine that may die: the jobs do not. `submit`, `cancel` and `end` are for the event loop.

    More than most_deaths engines dead within `window` seconds are the end: every open job fails, health is "dead", and
    on_dead is called in the event loop. A job that was there at most_deaths of them fails alone, before the last one.
    """

    def __init__(self, plan: Plan, most_deaths: int, window: float, on_dead: Callable[[], None]) -> None:
        self._plan = plan
        self._most_deaths, self._window, self._on_dead = most_deaths, window, on_dead
        self._loop = asyncio.get_running_loop()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._inbox: deque[tuple[str, Job]] = deque()
        self._jobs: dict[Job, None] = {}  # open ones, in the order they came
        self._news: list[tuple[Job, Told | Round]] = []
        self._deaths: deque[float] = deque()
        self._ending = ""
        self._draining = False
        self._health = Health()
        self.metrics = Metrics()
        self.status: Status | None = None
        self.heard = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="engine-driver", daemon=True)

    def start(self) -> None:
        """Start the engine; `health` tells how far it is."""
        self._thread.start()

    # ------------------------------------------------------------------ for the event loop

    @property
    def health(self) -> Health:
        """How the engine is, or that this server ends."""
        if self._draining and self._health.state != "dead":
            return replace(self._health, state="draining", reason=TOLD_TO_END)
        return self._health

    @property
    def open(self) -> int:
        """Jobs that have not ended."""
        return len(self._jobs)

    def jobs(self) -> list[Job]:
        """Jobs that have not ended, oldest first."""
        return list(self._jobs)

    @property
    def silence(self) -> float:
        """Seconds since the engine last answered."""
        return time.monotonic() - self.heard

    def check(self) -> None:
        """ApiError unless new jobs are taken."""
        health = self.health
        if health.state == "dead":
            raise gone(f"the engine is dead: {health.reason}", "engine_dead")
        if health.state != "ready":
            raise busy(f"not ready: {health.state}{': ' * bool(health.reason)}{health.reason}", 2.0, health.state)

    def submit(self, job: Job) -> None:
        """Start a job; ApiError as of `check`."""
        self.check()
        self._jobs[job] = None
        self._send("submit", job)
        with _harmless():
            self.metrics.begun(job)

    def cancel(self, job: Job, reason: str = "abort") -> None:
        """End a job; nothing more is told of it. No error for one that has ended. reason: why, for the metrics."""
        if job in self._jobs:
            del self._jobs[job]
            job.end_watchers()
            self._send("cancel", job)
            with _harmless():
                self.metrics.ended(job, reason)

    @contextlib.contextmanager
    def watching(self, job: Job) -> Iterator[Watcher]:
        """Look at the rounds of an open job."""
        watcher = Watcher()
        job.watchers.append(watcher)
        if job not in self._jobs:  # it has just ended
            watcher.end()
        self._send("watch", job)
        try:
            yield watcher
        finally:
            job.watchers.remove(watcher)

    def drain(self) -> None:
        """Take no new jobs."""
        self._draining = True

    async def end(self) -> None:
        """Fail what is open, and end the engine."""
        self._ending = self._ending or TOLD_TO_END  # why it gave up, if it did
        self._signal()
        await asyncio.to_thread(self._thread.join)
        os.close(self._wake)

    def _send(self, what: str, job: Job) -> None:
        self._inbox.append((what, job))
        self._signal()

    def _signal(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _deliver(self, news: Sequence[tuple[Job, Told | Round]]) -> None:
        for job, event in news:
            if job not in self._jobs:
                continue  # cancelled meanwhile
            if isinstance(event, Round):
                for watcher in job.watchers:
                    watcher.show(event)
                continue
            if isinstance(event, Finished | Failed | Refused):
                del self._jobs[job]
                job.end_watchers()
            job.tell(event)
            with _harmless():
                self.metrics.told(job, event)

    # ------------------------------------------------------------------ the thread

    def _run(self) -> None:
        while not self._ending:
            try:
                self._live()
            except EngineDead as error:
                self._die(str(error))
            except Exception as error:  # a bug of ours: clients must not wait for ever
                logger.exception("the engine's driver failed")
                self._give_up(f"{type(error).__name__}: {error}")
        self._fail_all("engine" if self._health.state == "dead" else "shutdown", self._ending)

    def _live(self) -> None:
        """The life of one engine."""
        self.status = None  # of the one before
        try:
            child = Child(self._plan)
        except ValueError as error:  # no room for its folder: there may be again
            raise EngineDead(str(error)) from None
        client = child.client(self._plan.config.stall_timeout, self._wake)
        client.usages = True
        session = Session(client, self._jobs, self._plan.model.max_position_embeddings, self._note)
        try:
            if self._load(client):
                self._serve(client, session)
        except EngineDead as error:
            reason = session.fault or str(error)
            self._look(client)  # its last words
            self._call(self.metrics.engine_died, self.status)
            self._change(state="restarting", reason=reason)  # its end may take seconds
            raise EngineDead(reason) from None
        finally:
            child.end()
            client.close()
            child.tidy()

    def _load(self, client: Client) -> bool:
        """Wait until the engine is ready; False if told to end."""
        deadline = time.monotonic() + self._plan.config.load_timeout
        while not self._ending:
            client.poll((), _MOMENT)
            self._look(client)
            if (status := client.latest) is not None:
                self._change(done=status.load_done, total=status.load_total)
                if status.state == "ready":
                    return True
            if time.monotonic() > deadline:
                raise EngineDead(f"not loaded within {self._plan.config.load_timeout:.0f} s")
            client.ask()
        return False

    def _serve(self, client: Client, session: Session) -> None:
        """Go on with what the engine before left open, then do what comes."""
        self._change(state="ready", reason="")
        logger.info("ready; %d open request(s) go on", len(self._jobs))
        self._inbox.clear()  # all that is wanted is in _jobs
        for job in self.jobs():
            session.start(job)
        asked = time.monotonic()
        while not self._ending:
            self._read_inbox(session)
            session.turn(_MOMENT)
            self._look(client)
            self._flush()
            if time.monotonic() > asked + _ASK:
                asked = time.monotonic()
                client.ask()

    def _read_inbox(self, session: Session) -> None:
        while self._inbox:
            what, job = self._inbox.popleft()
            {"submit": session.start, "cancel": session.cancel, "watch": session.watch}[what](job)

    def _look(self, client: Client) -> None:
        """Take note of a new status, and that we were woken."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        if client.latest is not None and client.latest is not self.status:
            self.status, self.heard = client.latest, time.monotonic()

    def _die(self, reason: str) -> None:
        """Count a death; give up after too many."""
        self._flush()
        now = time.monotonic()
        self._deaths.append(now)
        while self._deaths[0] < now - self._window:
            self._deaths.popleft()
        for job in self.jobs():
            if job.label is not None:
                job.outlive()
            if job.deaths >= max(_MOST_DEATHS, self._most_deaths):
                self._note(job, Failed(None, "engine", f"{job.deaths} engines died with this request open: {reason}"))
        self._change(state="restarting", reason=reason, done=0, restarts=self._health.restarts + 1)
        if len(self._deaths) > self._most_deaths:
            self._give_up(f"{len(self._deaths)} engines died within {self._window:.0f} s, the last: {reason}")
        else:
            logger.error("the engine died, the next one starts: %s", reason)
        self._flush()

    def _give_up(self, reason: str) -> None:
        logger.error("giving up: %s", reason)
        self._change(state="dead", reason=reason)
        self._ending = reason
        self._call(self._on_dead)

    def _fail_all(self, code: str, text: str) -> None:
        self._flush()
        self._news = [(job, Failed(None, code, text)) for job in self.jobs()]
        self._flush()

    def _note(self, job: Job, event: Told | Round) -> None:
        self._news.append((job, event))

    def _change(self, **values: object) -> None:
        self._health = replace(self._health, **values)  # type: ignore[arg-type]

    def _flush(self) -> None:
        if self._news:
            news, self._news = self._news, []
            self._call(self._deliver, news)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            logger.info("the event loop has ended before the engine")


@contextlib.contextmanager
def _harmless() -> Iterator[None]:
    """A figure must not end a stream."""
    try:
        yield
    except Exception:
        logger.exception("a metric could not be counted")
