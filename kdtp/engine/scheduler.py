"""Who runs in the next step, and when a request ends: queue, admission by KV pages, stop rules."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from kdtp.config import EngineConfig, ModelConfig
from kdtp.engine.pages import PagePool, pages_for
from kdtp.engine.request import Request


class QueueFull(RuntimeError):
    """No more requests may wait."""


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
        request.rule = request.params.rule(len(request.prompt), request.stops)
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
    for key, ids in _ids_of(request):
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


def _ids_of(request: Request) -> Iterator[tuple[str, Sequence[int]]]:
    params = request.params
    yield "prompt", request.prompt
    yield "stop_tokens", params.stop_tokens
    yield "allowed_tokens", params.allowed_tokens
    yield "banned_tokens", params.banned_tokens
    yield "logit_bias", tuple(params.logit_bias)
