"""The coordinator: every decision of the engine, one speculative round as a straight line (`Coordinator.step`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kdtp.config import EngineConfig, ModelConfig
from kdtp.draft.base import Ask, Drafter
from kdtp.engine.fleet import Fleet
from kdtp.engine.outcome import Event, Outcome, Picked, parts
from kdtp.engine.pages import PagePool
from kdtp.engine.request import Request
from kdtp.engine.scheduler import Scheduler
from kdtp.log import logger
from kdtp.messages import Failed, Finished
from kdtp.spec import accept, tree
from kdtp.types import NO_TOKEN, ROOT, Move, Proposal, SeqRows, TokenIds, Tree, depths

_ALARM_ROUNDS = 200
_MOST_LOGITS = 1 << 24  # of prompt rows that are scored at once: 64 MiB


class Coordinator:
    """Requests in, events out; between them numbered steps to the workers.

    Raises EngineFault from `step` when the workers cannot go on; `fail_all` then gives each open request
    its terminal event.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig, fleet: Fleet, drafter: Drafter) -> None:
        self.config = config
        self.model = model
        self.fleet = fleet
        self.drafter = drafter
        self.pool = PagePool(config.pages(model))
        # Scoring a row takes memory for the logits of the whole vocabulary.
        self._most_scored = max(1, _MOST_LOGITS // model.vocab_size)
        self.scheduler = Scheduler(config, model, self.pool)
        self.counters: Counter[str] = Counter()
        self._spent: dict[str, float] = {}
        self._drafting: set[int] = set()

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Queue a request: ValueError or QueueFull as of Scheduler.submit."""
        self.scheduler.submit(request)
        self.counters["requests"] += 1

    def cancel(self, request_id: int) -> Event | None:
        """End a request now; None if there is no such request."""
        request = self.scheduler.find(request_id)
        if request is None:
            self.counters["cancels_of_unknown"] += 1
            return None
        self._commit([], [request])
        return Event(Finished(request.id, "cancelled", request.usage()))

    def fail_all(self, code: str, text: str) -> list[Event]:
        """The terminal event of every open request, when the engine ends."""
        requests = [*self.scheduler.running, *self.scheduler.waiting]
        for request in requests:
            self.scheduler.remove(request)
        return [Event(Failed(request.id, code, text)) for request in requests]

    @property
    def idle(self) -> bool:
        """Whether no request is open."""
        return not self.scheduler.running and not self.scheduler.waiting

    # ------------------------------------------------------------------ one round

    def step(self) -> list[Event]:
        """Run one round for every running request, and say what came of it."""
        batch = self.scheduler.next()
        prefilling = [request.prefilling for request in batch]
        self._spent = {}
        with self._stage("draft"):
            proposals = self._propose(batch)
        begun = [request.begin() for request in batch if not request.pages_sent]
        with self._stage("build"):
            rows = [self._rows(request, proposals.get(request.id)) for request in batch]
        with self._stage("verify"):
            answer, logits = self.fleet.forward(rows, begun, any(request.want_logits for request in batch))
        with self._stage("accept"):
            answers = zip(batch, rows, parts(batch, rows, answer), strict=True)
            outcomes = [self._settle(request, r, picked) for request, r, picked in answers]
        with self._stage("commit"):
            ended = [o.request for o in outcomes if o.ended]
            self._commit([o.move for o in outcomes if o.move and not o.ended], ended)
            for outcome in outcomes:
                if not outcome.ended:
                    self._absorb(outcome)
        self._book(batch, prefilling)
        return [event for outcome in outcomes for event in outcome.events(logits, self.model.vocab_size)]

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._spent[name] = time.perf_counter() - start

    def _propose(self, batch: Sequence[Request]) -> dict[int, Proposal]:
        asks = [Ask(request.id, self._room(request)) for request in batch if self._speculates(request)]
        asks = [ask for ask in asks if ask.depth > 0]
        proposals = self.drafter.propose(asks) if asks else []
        return {ask.seq: p for ask, p in zip(asks, proposals, strict=True) if p is not None}

    def _speculates(self, request: Request) -> bool:
        return request.speculate and not request.prefilling and self.config.drafter.budget > 0

    def _room(self, request: Request) -> int:
        return request.room(self.config.drafter.block, self.model.max_position_embeddings)

    def _rows(self, request: Request, proposal: Proposal | None) -> SeqRows:
        """What this request runs: the next chunk of its prompt, or the tree grown from its root."""
        if request.prefilling:
            return self._chunk(request)
        grown = self._grow(request, proposal)
        return self._seq_rows(request, grown.tokens, grown.parents, len(grown))

    def _chunk(self, request: Request) -> SeqRows:
        scores = request.params.prompt_logprobs is not None
        size = min(self.config.prefill_chunk, self._most_scored) if scores else self.config.prefill_chunk
        chunk = request.prompt[request.start : request.start + size]
        end = request.start + len(chunk)
        pick = len(chunk) if scores else int(end == len(request.prompt))
        scored = request.prompt[request.start + 1 : end + 1] if scores else ()
        return self._seq_rows(request, chunk, tuple(range(ROOT, len(chunk) - 1)), pick, scored)

    def _grow(self, request: Request, proposal: Proposal | None) -> Tree:
        root = request.tokens[-1]
        if proposal is None:
            return Tree((root,), (ROOT,))
        build = tree.chain if self.config.drafter.shape == "chain" else tree.build
        return build(proposal, root, self.config.drafter.budget, self._room(request))

    def _seq_rows(
        self, request: Request, tokens: TokenIds, parents: tuple[int, ...], pick: int, scored: TokenIds = ()
    ) -> SeqRows:
        pages = () if request.pages_sent else request.pages
        request.pages_sent = True
        return SeqRows(request.id, request.start, tokens, parents, pick, pages, request.tell(), scored)

    # ------------------------------------------------------------------ what came of it

    def _settle(self, request: Request, rows: SeqRows, picked: Picked) -> Outcome:
        """Walk the request's tree and emit."""
        start = request.start
        if request.prefilling:
            kept = tuple(range(len(rows.tokens)))
            last = start + len(kept) == len(request.prompt)
            new, at = list(picked.ids[-1:] if last else ()), [rows.pick - 1]
        else:
            path = accept.walk(rows, picked.ids)
            kept, new = path.rows, [rows.tokens[row] for row in path.rows[1:]] + [path.bonus]
            at = list(kept)
        request.start += len(kept)
        request.forwards += 1
        broken = NO_TOKEN in new
        emitted, reason = request.extend(new[: -1 if broken else None], self.model.max_position_embeddings)
        if start >= len(request.prompt):
            self._count(request, max(depths(rows.parents)), min(len(kept) - 1, len(emitted)))
        move = Move(rows.seq, start, kept) if kept != tuple(range(len(kept))) else None
        at = at[: len(emitted)]
        broken = broken and reason is None
        return Outcome(request, start, picked, emitted, at, move, len(rows.scored), reason, broken)

    def _count(self, request: Request, depth: int, matched: int) -> None:
        request.count_round(depth, matched)
        if depth:
            self.counters["rounds"] += 1
            self.counters["accepted"] += matched
        if self.counters["rounds"] == _ALARM_ROUNDS and not self.counters["accepted"]:
            logger.warning("no draft token accepted in %d rounds: is the drafter wired to this model?", _ALARM_ROUNDS)

    def _commit(self, moves: Sequence[Move], ended: Sequence[Request]) -> None:
        """Tell the workers which rows to keep and which sequences to forget."""
        released = [request.id for request in ended if self.scheduler.remove(request)]
        if moves or released:
            self.fleet.commit(moves, released)
        for request in ended:
            if request.id in self._drafting:
                self._drafting.remove(request.id)
                self.drafter.close(request.id)

    def _absorb(self, outcome: Outcome) -> None:
        request = outcome.request
        if not request.speculate or not outcome.emitted:
            return
        if request.id not in self._drafting:
            self._drafting.add(request.id)
            self.drafter.open(request.id, request.prompt)
        self.drafter.absorb(request.id, outcome.emitted)

    def _book(self, batch: Sequence[Request], prefilled: Sequence[bool]) -> None:
        for request, prefill in zip(batch, prefilled, strict=True):
            if prefill:
                request.seconds["prefill"] += sum(self._spent.values())
            else:
                for stage, seconds in self._spent.items():
                    request.seconds[stage] += seconds
