"""All workers as one: numbered steps sent to every rank and gathered from every rank, each within its deadline."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import zmq

from kdtp.drafting import Draft, Drafts, Keep, Root, Rows
from kdtp.engine.link import Arrived, EngineFault, Link, LocalLink, ZmqLink
from kdtp.log import logger
from kdtp.messages import Begin, Commit, Fault, Forward, FromWorker, Hello, Ids, Shutdown, ToWorker
from kdtp.types import Move, SeqRows

_FIRST_STEP = 60.0  # seconds
_MOMENT = 0.3  # seconds
_STOPPED = 1.0  # seconds behind its end that a wait comes back: no process that runs is so late
_BUSY = 0.05  # seconds; a step usually takes less
Arrival = tuple[Link, FromWorker, bytes | None]
Way = tuple[Link, Callable[[], Arrived | None]]
A = TypeVar("A", Ids, Drafts)


class Fleet:
    """All links of one engine, in rank order, and the numbered steps that go over them.

    `step` and `epoch` stand in every message: an answer that carries others is dropped and counted. busy: poll for
    answers for a while before sleeping.
    """

    def __init__(self, links: Sequence[Link], epoch: int, step_timeout: float, busy: bool = False) -> None:
        assert [link.rank for link in links] == list(range(len(links))), "links out of rank order"
        self.links = links
        self.epoch = epoch
        self.step = 0
        self.desync_checks = self.desync_failures = 0
        self._step_timeout = step_timeout
        self._seconds_per_row: float | None = None
        self.on_long: Callable[[float], object] = lambda seconds: None  # before a step that may take so long
        self._late: Commit | None = None
        self.on_wait: Callable[[], object] = lambda: None  # while ranks draft
        self.features = 0, 0  # process and descriptor of what the last forward has left, if it was to
        self._local = [link for link in links if isinstance(link, LocalLink)]
        self._remote = [link for link in links if isinstance(link, ZmqLink)]
        self._busy = _BUSY if busy and self._remote else 0.0
        self._lanes: list[Way] = [(link, link.receive) for link in self._remote]
        self._poller = zmq.Poller()
        self._ways: dict[object, Way] = {}  # by what the poller calls it
        for link in self._remote:
            self._add(link.socket, link, link.greet)
            self._add(link.listener.fileno(), link, link.accept)

    def forward(
        self, seqs: Sequence[SeqRows], begun: Sequence[Begin] = (), want_logits: bool = False
    ) -> tuple[Ids, bytes | None]:
        """One step on all ranks: an id for each picked row, and the float32 logits [R, V] of these rows if wanted.

        EngineFault when a rank dies, fails, stays silent past the deadline, chose other ids than rank 0 or made other
        collectives. Without sequences it asks for a sign of life.
        """
        self._tell_late()
        self.step += 1
        rows = sum(len(s.tokens) for s in seqs)
        timeout = self._timeout(rows)
        if timeout > self._step_timeout:
            self.on_long(timeout)
        started = time.monotonic()
        self.send(Forward(self.epoch, self.step, tuple(seqs), tuple(begun), want_logits))
        answers = self._gather(Ids, self.links, started + timeout)
        self._check(answers, sum(s.pick for s in seqs), want_logits)
        if rows:
            each = (time.monotonic() - started) / rows
            before = each if self._seconds_per_row is None else self._seconds_per_row
            self._seconds_per_row = before + 0.1 * (each - before)
        hello, left = self.links[0].hello, answers[0][0].features
        if left is not None:
            self.features = os.getpid() if hello is None else hello.pid, left
        return answers[0]

    def _timeout(self, rows: int) -> float:
        """Seconds for a step. A rank in this process cannot be given up; how fast it is shows in its first step."""
        if self._seconds_per_row is None and self._local and rows:
            return max(self._step_timeout, _FIRST_STEP)
        return max(self._step_timeout, 10 * (self._seconds_per_row or 0.0) * rows)

    def commit(self, moves: Sequence[Move], released: Sequence[int], later: bool = False) -> None:
        """Tell all ranks which rows of the last step to keep and which sequences to forget. Not answered.

        later: at the latest before the next forward or commit, but if a draft comes first, while the ranks are at it:
        it reads nothing that is moved. A rank that cannot be told is a fault of the next step: what this one gave must
        still reach its clients.
        """
        self._tell_late()
        self._late = Commit(self.epoch, self.step, tuple(moves), tuple(released))
        if not later:
            self._tell_late()

    def _tell_late(self) -> None:
        late, self._late = self._late, None
        if late is not None:
            self.send(late)

    def keep(self, kept: Sequence[Rows]) -> None:
        """Tell all ranks which of the last step's rows their network is to take in. As `commit`."""
        self.send(Keep(self.epoch, self.step, tuple(kept)))

    def draft(self, roots: Sequence[Root], shape: str = "") -> tuple[tuple[int, ...], bytes]:
        """Draft on all ranks: the shape of what rank 0 answers, and its frame, as in Drafts. EngineFault as forward."""
        self.send(Draft(self.epoch, self.step, tuple(roots), shape))
        deadline = time.monotonic() + self._step_timeout
        self._tell_late()
        self.on_wait()
        drafts, frame = self._gather(Drafts, self.links[:1], deadline)[0]
        if drafts.shape[:1] != (len(roots),) or len(drafts.shape) not in ((2,) if shape else (3, 4)):
            raise EngineFault(f"step {self.step}: drafts of shape {drafts.shape} for {len(roots)} roots")
        return drafts.shape, frame or b""

    def dismiss(self, reason: str) -> None:
        """Tell the ranks to end; one that cannot be reached any more is left to the launcher."""
        for link in self.links:
            if link.hello is not None:
                try:
                    link.send(Shutdown(reason))
                except EngineFault as error:
                    logger.info("%s", error)

    def _gather(self, kind: type[A], links: Sequence[Link], deadline: float) -> dict[int, tuple[A, bytes | None]]:
        """The answer of each of these ranks to this step."""
        answers: dict[int, tuple[A, bytes | None]] = {}
        busy_until = time.monotonic() + self._busy
        while len(answers) < len(links):
            arrived = False
            for link, message, frame in self.arrivals(deadline, busy_until):
                arrived = True
                if isinstance(message, kind) and self._fits(message, link) and link.rank not in answers:
                    answers[link.rank] = (message, frame)
                    link.last_step, link.answered = message.step, time.monotonic()
                else:
                    link.dropped["stale"] += 1
            if not arrived:
                if (now := time.monotonic()) > deadline + _STOPPED:  # so were we, and perhaps the ranks with us
                    deadline = now + self._step_timeout
                    continue
                # Of one that waits for others in a collective, those may be to blame.
                silent = [link for link in self.links if link.rank not in answers]
                raise EngineFault(f"step {self.step} not answered in time by {_describe(silent)}")
        return answers

    def _fits(self, answer: Ids | Drafts, link: Link) -> bool:
        return (answer.epoch, answer.step, answer.rank) == (self.epoch, self.step, link.rank)

    def _check(self, answers: dict[int, tuple[Ids, bytes | None]], picked: int, want_logits: bool) -> None:
        first, frame = answers[0]
        self.desync_checks += 1
        for rank, (ids, _) in answers.items():
            parted = f"chose {ids.ids}, rank 0 chose {first.ids}" if ids.ids != first.ids else ""
            parted = "has made other collectives than rank 0 so far" if ids.made != first.made else parted
            if parted:
                self.desync_failures += 1
                raise EngineFault(f"step {self.step}: rank {rank} {parted}")
        if len(first.ids) != picked:
            raise EngineFault(f"step {self.step}: {len(first.ids)} ids for {picked} picked rows")
        if want_logits and picked and (first.shape is None or len(frame or b"") != 4 * first.shape[0] * first.shape[1]):
            raise EngineFault(f"step {self.step}: logits of shape {first.shape} in {len(frame or b'')} bytes")

    def send(self, message: ToWorker) -> None:
        """To every rank; to those in other processes first, so that they work while a local one runs."""
        order: list[Link] = [*self._remote, *self._local]
        for link in order:
            link.send(message)

    def arrivals(self, deadline: float, busy_until: float = 0.0) -> Iterator[Arrival]:
        """What has arrived, after waiting for at least one message until `deadline` (time.monotonic()), until
        `busy_until` without sleeping.

        Raises EngineFault when a process has ended or a rank reports a Fault. Yields nothing after the deadline.
        """
        yielded = False
        while ready := self._ready(deadline, busy_until):
            for link, read in ready:
                while (got := read()) is not None:
                    yielded = True
                    if isinstance(got[0], Fault):
                        raise EngineFault(self._cause(f"rank {link.rank} failed: {got[0].text}"))
                    yield link, *got
            if yielded or time.monotonic() >= deadline:
                return

    def _ready(self, deadline: float, busy_until: float) -> Sequence[Way]:
        """Where there is input, after waiting for some. What a process sent before it ended is read first."""
        ready: list[Way] = [(link, link.receive) for link in self._local if link.pending]
        if ready:
            return ready
        for link in self._remote:
            if link.ended:
                raise EngineFault(self._cause(f"rank {link.rank} {link.ended}"))
        if time.monotonic() < busy_until:
            return self._lanes
        self._watch()
        polled = dict(self._poller.poll(max(0, int((deadline - time.monotonic()) * 1000))))
        ready = [self._ways[what] for what in polled if what in self._ways]
        if polled and not ready:
            raise EngineFault(self._cause("a worker ended"))
        return ready

    def _add(self, what: Any, link: Link, read: Callable[[], Arrived | None]) -> None:
        self._ways[what] = link, read
        self._poller.register(what, zmq.POLLIN)

    def _watch(self) -> None:
        """Poll every lane, and for the end of every process that has said hello."""
        for link in self._remote:
            if link.pidfd is not None and link.pidfd not in self._poller:
                self._poller.register(link.pidfd, zmq.POLLIN)
            if link.lane is not None:
                self._ways[link.lane.fileno()] = link, link.receive
                self._poller.register(link.lane.fileno(), zmq.POLLIN | (zmq.POLLOUT if link.lane.writes else 0))

    def _cause(self, text: str) -> str:
        # When a rank dies its peers fail in their collective at once, and may be gone before it is: wait a moment for
        # one that has not said why it ended, and name it first.
        deadline, gone = time.monotonic() + _MOMENT, self._gone(0.0)
        while (left := deadline - time.monotonic()) > 0 and all(link.told_fault() for link in gone):
            gone += self._gone(left, gone)
        silent = [link for link in gone if not link.told_fault()]
        return f"{_ends(silent or gone)}; {text}" if gone else text

    def ended(self) -> str:
        """Which worker processes have ended, as text; empty if none has."""
        return _ends(self._gone(0.0))

    def _gone(self, timeout: float, known: Sequence[ZmqLink] = ()) -> list[ZmqLink]:
        """Links of processes that have ended, besides those known, after waiting for one."""
        poller = zmq.Poller()
        watched = {link.pidfd: link for link in self._remote if link.pidfd is not None and link not in known}
        for pidfd in watched:
            poller.register(pidfd, zmq.POLLIN)
        return [watched[fd] for fd, _ in poller.poll(int(timeout * 1000))]

    def step_ages(self) -> list[float]:
        """Seconds since each rank last answered a step; empty until all have answered one."""
        now = time.monotonic()
        return [now - link.answered for link in self.links] if all(link.answered for link in self.links) else []

    def dropped(self) -> Counter[str]:
        """Frames dropped on all links, by reason."""
        total: Counter[str] = Counter()
        for link in self.links:
            total.update(link.dropped)
        return total

    def close(self) -> None:
        for link in self.links:
            link.close()


def _ends(links: Sequence[ZmqLink]) -> str:
    return ", ".join(f"rank {link.rank} (pid {link.hello.pid if link.hello else '?'}) ended" for link in links)


def _describe(links: Sequence[Link]) -> str:
    """What is known of ranks that did not answer: last step, and the state the kernel gives."""
    return ", ".join(
        f"rank {link.rank} (pid {link.hello.pid if link.hello else '?'}, last answered step {link.last_step}, "
        f"process state {_state(link.hello)})"
        for link in links
    )


def _state(hello: Hello | None) -> str:
    if hello is None:
        return "unknown"
    try:
        lines = Path(f"/proc/{hello.pid}/status").read_text().splitlines()
    except OSError:
        return "gone"
    return next((line.split(None, 1)[1] for line in lines if line.startswith("State:")), "unknown")
