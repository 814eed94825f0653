"""Who runs in the next step and how wide: queue, admission, growth and preemption by KV pages, prefix hits."""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kdtp.config import EngineConfig, ModelConfig
from kdtp.engine.limits import check_request, longest
from kdtp.engine.pages import Content, PagePool, pages_for
from kdtp.engine.request import Request
from kdtp.types import PAGE_ROWS

_LEAST_WAIT, _MOST_WAIT = 0.1, 60.0  # seconds
_MOST_HELD = 64  # requests that are passed over in a step: each costs a look into the prefix cache


class QueueFull(RuntimeError):
    """No more requests may wait; retry_after: seconds until there may be room, an estimate."""

    def __init__(self, text: str, retry_after: float) -> None:
        super().__init__(text)
        self.retry_after = retry_after


class Turn(NamedTuple):
    """A request's part in a step. rows: of its text, if it is a chunk, else of its tree at most, the root included."""

    request: Request
    rows: int
    chunk: bool


@dataclass
class Step:
    """Who runs; who has lost its rows and waits again, by id if the workers know it; who has been given pages."""

    turns: list[Turn] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)


class Scheduler:
    """By priority, then first come, first served.

    A request is admitted when there are pages for the text it must run, and grows with its tree. When no page is free
    the last in order of those that run loses its rows and runs its text again later; the first is never preempted, so
    there is always one that gets on. Every step runs at most `prefill_chunk` rows of text beside the trees.
    counters: prefix_queries, prefix_hits (tokens), preemptions.
    """

    def __init__(
        self, config: EngineConfig, model: ModelConfig, pool: PagePool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.config = config
        self.model = model
        self.pool = pool
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.waiting_tokens = 0
        self.counters: Counter[str] = Counter()
        self._submitted = 0
        self._clock = clock
        self._departed: float | None = None
        self._pause = 1.0  # seconds between two departures, a moving average

    # ------------------------------------------------------------------ coming and going

    def check(self, request: Request) -> None:
        """Find its stops. ValueError if it can never run, QueueFull if too much waits."""
        ends = () if request.params.ignore_eos else self.model.eos_token_ids
        request.stops = frozenset(request.params.stop_tokens).union(ends)
        check_request(request, self.config, self.model)
        self._check_queue(request)

    def submit(self, request: Request) -> None:
        """Queue a request that was checked."""
        request.rule = request.params.rule(len(request.prompt), request.stops)
        self._submitted += 1
        request.order = self._submitted
        self._wait(request)

    def _check_queue(self, request: Request) -> None:
        count, tokens = len(self.waiting), self.waiting_tokens
        text = ""
        if count >= self.config.max_queue:
            text = f"{count} requests are waiting, the limit is max_queue {self.config.max_queue}"
        elif count and tokens + len(request.prompt) > self.config.max_queue_tokens:
            limit = f"the limit is max_queue_tokens {self.config.max_queue_tokens}"
            text = f"{tokens} tokens are waiting, this prompt has {len(request.prompt)}, {limit}"
        if text:
            raise QueueFull(text, min(max(self._pause, _LEAST_WAIT), _MOST_WAIT))

    def _wait(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda r: r.rank)
        self.waiting_tokens += request.goal

    def find(self, request_id: int) -> Request | None:
        """The open request of that id."""
        return next((r for r in (*self.running, *self.waiting) if r.id == request_id), None)

    def remove(self, request: Request) -> bool:
        """Forget a request and free its pages; whether the workers know it."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)
            self.waiting_tokens -= request.goal
        self.pool.give(request.pages)
        begun = request.begun
        request.forget()
        now = self._clock()
        if self._departed is not None:
            self._pause += 0.2 * (now - self._departed - self._pause)
        self._departed = now
        return begun

    def keep(self, request: Request) -> None:
        """Make the pages that its committed text has filled known by content."""
        if not self.config.prefix_cache:
            return
        filled = min(request.start, len(request.prompt) + len(request.tokens)) // PAGE_ROWS
        while request.kept < filled:
            page = request.kept
            parent, key = request.keys(page + 1)[-2:]
            content = Content(parent, request.span(page * PAGE_ROWS, (page + 1) * PAGE_ROWS))
            self.pool.keep(request.pages[page], key, content)
            request.kept += 1

    # ------------------------------------------------------------------ the next step

    def next(self) -> Step:
        """Grow who runs, admit what fits, and share the step."""
        step = Step()
        for request in self.running.copy():
            # Those that were preempted for others before them are not running any more.
            if not request.prefilling and (not step.preempted or request in self.running):
                self._grow(request, step)
        if self.waiting and not step.preempted:
            self._admit(step)
        todo = [request.goal - request.start for request in self.running]
        chunks = share(self.config.prefill_chunk, todo) if any(todo) else todo
        for request, rows, left in zip(self.running, chunks, todo, strict=True):
            if not left:
                step.turns.append(Turn(request, len(request.pages) * PAGE_ROWS - request.start, False))
            elif rows:
                step.turns.append(Turn(request, rows, True))
        return step

    def _grow(self, request: Request, step: Step) -> None:
        """Pages for the root, at the cost of those behind it in order; for its tree only if there are any."""
        if self._reach(request, request.start + 1 + self.budget(request)):
            return
        while not self._reach(request, request.start + 1):
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is request:
                return

    def _reach(self, request: Request, rows: int) -> bool:
        more = pages_for(rows) - len(request.pages)
        if more <= 0:
            return True
        pages = self.pool.take(more)
        if pages is None:
            return False
        request.pages += pages
        return True

    def _preempt(self, request: Request, step: Step) -> None:
        step.preempted.append(request)
        if request.begun:
            step.released.append(request.id)
        self.running.remove(request)
        self.pool.give(request.pages)
        request.forget()
        request.preemptions += 1
        self.counters["preemptions"] += 1
        self._wait(request)

    def budget(self, request: Request) -> int:
        """Nodes that a tree of the request may have below its root."""
        most = self.config.drafter.budget
        if not request.speculate or self.config.drafter.name == "none":
            return 0
        return most if request.budget is None else min(most, request.budget)

    def _admit(self, step: Step) -> None:
        held = 0  # waiting for the pages of one that runs
        while held < min(len(self.waiting), _MOST_HELD) and len(self.running) < self.config.max_batch:
            request = self.waiting[held]
            hits = self._hits(request)
            if self._comes(request, len(hits)):
                held += 1
            elif self._start(request, hits):
                step.admitted.append(request)
            else:
                break

    def _hits(self, request: Request) -> list[int]:
        """Pages that hold the beginning of its text. At least one row is left to run: its logits choose a token."""
        if not self.config.prefix_cache or request.params.prompt_logprobs is not None:
            return []
        most = (request.goal - (not request.tokens)) // PAGE_ROWS
        return self.pool.find(request.keys(most), request.span(0, most * PAGE_ROWS))

    def _comes(self, request: Request, hits: int) -> bool:
        """Whether a page that it lacks is being made for another: n samples of one prompt run it once."""
        pages = (request.goal - 1) // PAGE_ROWS
        if not self.config.prefix_cache or request.params.prompt_logprobs is not None or hits >= pages:
            return False
        key = request.keys(hits + 1)[-1]
        makers = (r for r in self.running if r.prefilling and r.goal // PAGE_ROWS > hits)
        return any(r.keys(hits + 1)[-1] == key for r in makers)

    def _start(self, request: Request, hits: list[int]) -> bool:
        self.pool.hold(hits)
        more = pages_for(min(request.goal + 1, longest(request, self.model))) - len(hits)
        # Each of those that run may need a page soon: what is admitted now should not be preempted at once.
        soon = sum(len(r.pages) < pages_for(longest(r, self.model)) for r in self.running)
        pages = self.pool.take(more) if self.pool.free >= more + soon else None
        if pages is None:
            self.pool.give(hits)
            return False
        self.waiting.remove(request)
        self.waiting_tokens -= request.goal
        request.pages = hits + pages
        request.start = len(hits) * PAGE_ROWS
        request.kept = len(hits)
        if not request.preemptions:
            request.cached = request.start
            request.queued = time.monotonic() - request.submitted
        self.counters["prefix_queries"] += request.goal
        self.counters["prefix_hits"] += request.start
        insort(self.running, request, key=lambda r: r.rank)
        return True


def share(budget: int, rows: Sequence[int]) -> list[int]:
    """How many of the rows that each still has to run, given in order, it may run now: `budget` in all.

    Half goes to the first, so that it gets on whoever comes; the rest to those that will soon be done.
    """
    given = [0] * len(rows)
    left = budget
    first = next((i for i, r in enumerate(rows) if r > 0), None)
    if first is not None:
        given[first] = min(rows[first], -(-budget // 2))
        left -= given[first]
    for i in sorted(range(len(rows)), key=lambda i: rows[i]):
        more = min(left, max(0, rows[i] - given[i]))
        given[i] += more
        left -= more
    return given
