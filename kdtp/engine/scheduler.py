"""Who runs in the next step, and when a request ends: queue, admission by KV pages, stop rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kdtp.config import EngineConfig, ModelConfig
from kdtp.engine.pages import PagePool, pages_for
from kdtp.messages import Usage
from kdtp.types import SamplingParams

STAGES = ("prefill", "draft", "build", "verify", "accept", "commit")


class QueueFull(RuntimeError):
    """No more requests may wait."""


@dataclass
class Request:
    """One request, from submit to its end. `id` also names its sequence on the workers.

    start: rows of KV committed; tokens: emitted so far, of which the last is the root (it has no KV yet);
    stops: token ids that end it; pages: its part of the pool, taken when it is admitted.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    speculate: bool = True
    want_logits: bool = False
    stops: frozenset[int] = frozenset()
    start: int = 0
    tokens: list[int] = field(default_factory=list)
    pages: tuple[int, ...] = ()
    pages_sent: bool = False
    rounds: int = 0
    forwards: int = 0
    committed: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @property
    def prefilling(self) -> bool:
        """Whether prompt tokens are still to be run."""
        return self.start < len(self.prompt)

    def room(self, block: int, max_positions: int) -> int:
        """How deep a draft may be now: no node beyond the last token asked for, nor beyond the last position.

        A node for the very last token adds nothing to the output, but it leaves the KV of every emitted token behind.
        """
        remaining = self.params.max_tokens - len(self.tokens)
        return max(0, min(block - 1, remaining, max_positions - 1 - self.start))

    def extend(self, chosen: Sequence[int], max_positions: int) -> tuple[list[int], str | None]:
        """Emit `chosen` up to the first stop, the length asked for or the context end: what was emitted, and why
        the request is finished (None: it is not)."""
        emitted: list[int] = []
        for token in chosen:
            emitted.append(token)
            self.tokens.append(token)
            if token in self.stops:
                return emitted, "stop"
            if len(self.tokens) == self.params.max_tokens:
                return emitted, "length"
        # The new root would be run at position `start`.
        return emitted, "length" if self.start >= max_positions else None

    def count_round(self, depth: int, matched: int) -> None:
        """Record a verify round: a draft of `depth`, of which `matched` tokens were accepted and emitted."""
        self.rounds += 1
        self.committed += 1 + matched
        for counts, upto in ((self.drafted, depth), (self.accepted, matched)):
            counts.extend([0] * (depth - len(counts)))
            for d in range(upto):
                counts[d] += 1

    def usage(self) -> Usage:
        """What the request has cost so far."""
        milliseconds = {stage: round(seconds * 1e3, 3) for stage, seconds in self.seconds.items()}
        return Usage(
            prompt_tokens=len(self.prompt),
            completion_tokens=len(self.tokens),
            rounds=self.rounds,
            forwards=self.forwards,
            committed=self.committed,
            drafted_by_depth=tuple(self.drafted),
            accepted_by_depth=tuple(self.accepted),
            timings_ms=milliseconds,
        )


class Scheduler:
    """First come, first served: the head of the queue is admitted when a place and all pages it can ever need are free.

    So an admitted request never waits for memory, and a request that cannot be admitted yet holds back those behind it.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, pool: PagePool) -> None:
        self.config = config
        self.model = model
        self.pool = pool
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError if it can never run, QueueFull if too many wait."""
        check_request(request, self.config, self.model)
        if len(self.waiting) >= self.config.max_queue:
            raise QueueFull(f"{len(self.waiting)} requests are waiting, the limit is max_queue {self.config.max_queue}")
        ends = () if request.params.ignore_eos else self.model.eos_token_ids
        request.stops = frozenset(request.params.stop_tokens).union(ends)
        self.waiting.append(request)

    def next(self) -> list[Request]:
        """Admit what fits, and give the requests of the next step."""
        while self.waiting and len(self.running) < self.config.max_batch:
            pages = self.pool.take(pages_needed(self.waiting[0], self.config, self.model))
            if pages is None:
                break
            request = self.waiting.popleft()
            request.pages = pages
            self.running.append(request)
        return list(self.running)

    def remove(self, request: Request) -> bool:
        """Forget a request and free its pages; whether the workers know it (it has run)."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        self.pool.give(request.pages)
        request.pages = ()
        return request.pages_sent

    def find(self, request_id: int) -> Request | None:
        """The open request of that id."""
        return next((r for r in (*self.running, *self.waiting) if r.id == request_id), None)


def pages_needed(request: Request, config: EngineConfig, model: ModelConfig) -> int:
    """Pages that hold the request at its longest, with the widest tree behind it."""
    length = min(len(request.prompt) + request.params.max_tokens, model.max_position_embeddings)
    return pages_for(length + 1 + (config.drafter.budget if request.speculate else 0))


def check_request(request: Request, config: EngineConfig, model: ModelConfig) -> None:
    """Raise ValueError if the request can never run, naming what, the value and what is legal."""
    if not request.prompt:
        raise ValueError("prompt = []: must have at least one token")
    for key, ids in (("prompt", request.prompt), ("stop_tokens", request.params.stop_tokens)):
        bad = next((i for i, token in enumerate(ids) if not 0 <= token < model.vocab_size), None)
        if bad is not None:
            raise ValueError(f"{key}[{bad}] = {ids[bad]}: must be in [0, {model.vocab_size})")
    if len(request.prompt) > model.max_position_embeddings:
        limit = model.max_position_embeddings
        raise ValueError(f"prompt: {len(request.prompt)} tokens, but the model's context is {limit}")
    need, have = pages_needed(request, config, model), config.pages(model)
    if need > have:
        amounts = f"prompt of {len(request.prompt)} and max_tokens {request.params.max_tokens}"
        raise ValueError(f"{amounts} need {need} KV pages, the cache has {have}")
