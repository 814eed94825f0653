"""The coordinator: every decision of the engine, one speculative round as a straight line (`Coordinator.step`)."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from kdtp.config import EngineConfig, ModelConfig
from kdtp.draft.base import Ask, Drafter, Kept
from kdtp.engine.fleet import Fleet
from kdtp.engine.limits import no_choice
from kdtp.engine.outcome import Event, Outcome, Picked, parts
from kdtp.engine.pages import PagePool
from kdtp.engine.request import STAGES, Request
from kdtp.engine.rows import chunk, verify
from kdtp.engine.scheduler import Scheduler, Step, Turn
from kdtp.engine.watched import Watched
from kdtp.engine.widths import Widths
from kdtp.log import logger
from kdtp.messages import Failed, Finished
from kdtp.proposals import Grown, Proposal
from kdtp.spec import accept
from kdtp.spec.grammar import Matcher
from kdtp.spec.tree import grow
from kdtp.types import NO_TOKEN, ROOT, Grammar, Move, SeqRows, Tree, depths

Compile = Callable[[Grammar], Matcher]

_ALARM_ROUNDS = 200
_MOST_LOGITS = 1 << 24  # of prompt rows that are scored at once: 64 MiB


class Coordinator:
    """Requests in, events out; between them numbered steps to the workers.

    Raises EngineFault from `step` when the workers cannot go on; `fail_all` then gives each open request its terminal
    event. compile_: of the grammars of requests; without it none is taken.
    """

    def __init__(
        self, config: EngineConfig, model: ModelConfig, fleet: Fleet, drafter: Drafter, compile_: Compile | None = None
    ) -> None:
        self.config = config
        self.model = model
        self.fleet = fleet
        self.drafter = drafter
        self.pool = PagePool(config.pages(model))
        # Scoring a row takes memory for the logits of the whole vocabulary.
        self._most_scored = max(1, _MOST_LOGITS // model.vocab_size)
        self.scheduler = Scheduler(config, model, self.pool)
        self.counters: Counter[str] = Counter()
        self.watched = Watched()
        self.seconds = dict.fromkeys(STAGES[1:], 0.0)  # of all steps
        self.accepted: Counter[int] = Counter()  # rounds by draft tokens accepted
        self.tallies: dict[str, Counter[int]] = {name: Counter() for name in ("tree_nodes", "tree_depth", "step_rows")}
        self.widths: Widths | None = None  # of the budget
        self.compile = compile_ or _no_grammars
        self._spent: dict[str, float] = {}
        self._ended: float | None = None  # when the last round did, if another was to follow
        self._drafting: set[int] = set()
        self._ranks_draft = config.drafter.network and config.drafter.placement == "workers"

    def start(self) -> None:
        """Get ready, once the ranks are: the drafter, and what widths cost if they follow it. EngineFault as step."""
        self.drafter.start()
        if self.config.drafter.width == "auto" and self.config.drafter.name != "none":
            self.widths = Widths.measured(self.config, self.model, self.fleet, self.pool, self.drafter)
            self.fleet.on_wait = self.widths.catch_up

    # ------------------------------------------------------------------ requests

    def check(self, request: Request) -> None:
        """What can be said of a request before its grammar is compiled: errors as of Scheduler.check."""
        self.scheduler.check(request)

    def submit(self, request: Request) -> None:
        """Queue a request. ValueError or QueueFull as of `check`; ValueError for a grammar, which is compiled now if it
        was not before, or for rules that leave no first token."""
        self.check(request)
        if request.params.grammar is not None:
            request.matcher = request.matcher or self.compile(request.params.grammar)
            request.stops |= request.matcher.ends
            request.follow(request.tokens)
        if request.params.max_tokens and (problem := no_choice(request, self.model.vocab_size)):
            raise ValueError(problem)
        self.scheduler.submit(request)
        self.counters["requests"] += 1

    def cancel(self, request_id: int) -> Event | None:
        """End a request now; None if there is no such request."""
        request = self.scheduler.find(request_id)
        if request is None:
            self.counters["cancels_of_unknown"] += 1
            return None
        self._commit([], [request])
        self.watched.forget(request.id)
        return Event(Finished(request.id, "cancelled", request.usage()))

    def watch(self, request_id: int, rounds: int) -> None:
        """Show the next rounds of a request, if it is open."""
        if self.scheduler.find(request_id):
            self.watched.ask(request_id, rounds)

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

    def totals(self) -> Counter[str]:
        """Everything counted so far."""
        return self.counters + self.scheduler.counters + Counter(prefix_evictions=self.pool.evictions)

    # ------------------------------------------------------------------ one round

    def step(self) -> list[Event]:
        """Run one round for every running request, and say what came of it."""
        began = self._ended or time.perf_counter()
        plan = self.scheduler.next()
        self._make_way(plan)
        self._spent = {}
        with self._stage("draft"):
            proposals = self._propose(plan.turns)
        begun = [turn.request.begin() for turn in plan.turns if not turn.request.begun]
        with self._stage("build"):
            grown = self._grow(plan.turns, proposals)
            rows = [self._rows(turn, grown) for turn in plan.turns]
        self.tallies["step_rows"][sum(len(r.tokens) for r in rows)] += 1
        with self._stage("verify"):
            want_logits = any(turn.request.want_logits for turn in plan.turns)
            answer, logits = self.fleet.forward(rows, begun, want_logits)
        with self._stage("accept"):
            answers = zip(plan.turns, rows, parts(plan.turns, rows, answer), strict=True)
            outcomes = [self._settle(turn, r, picked) for turn, r, picked in answers]
        with self._stage("commit"):
            self.drafter.keep(list(_kept(rows, outcomes)))
            self._commit([o.move for o in outcomes if o.move], [o.request for o in outcomes if o.ended], later=True)
            for outcome in outcomes:
                if not outcome.ended:
                    self._absorb(outcome)
        self._ended = None if self.idle else time.perf_counter()
        if self.widths:
            # What is done between two rounds is done once a round: telling clients, hearing them.
            self.widths.learn(rows, grown, outcomes, self._spent, (self._ended or time.perf_counter()) - began)
        self._book(plan.turns)
        shown = self.watched.events(plan.turns, rows, grown, outcomes, self._spent) if self.watched else []
        for outcome in outcomes:
            if outcome.ended:
                self.watched.forget(outcome.request.id)
        return shown + [event for outcome in outcomes for event in outcome.events(logits, self.model.vocab_size)]

    def _make_way(self, plan: Step) -> None:
        """What the plan changes before anything runs: who was preempted is forgotten, who comes is followed."""
        if plan.released:
            self.fleet.commit([], plan.released)
        for request in plan.preempted:
            self._close(request)
        for request in plan.admitted:
            if self.scheduler.budget(request):
                self._drafting.add(request.id)
                self.drafter.admit(
                    request.id, request.span(0, len(request.prompt) + len(request.tokens)), request.start
                )

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._spent[name] = time.perf_counter() - start

    def _propose(self, turns: Sequence[Turn]) -> dict[int, Proposal]:
        asking = [turn for turn in turns if self._width(turn) > 0 and self._room(turn.request) > 0]
        if not asking:
            return {}
        chosen = self.widths.pick(asking) if self.widths else asking
        if not chosen:
            self.counters["rounds_not_drafted"] += 1
            return {}
        asks = [Ask(t.request.id, self._room(t.request), t.request.pages, self._width(t)) for t in chosen]
        return {ask.seq: p for ask, p in zip(asks, self.drafter.propose(asks), strict=True) if p is not None}

    def _width(self, turn: Turn) -> int:
        """How many nodes below the root the request's tree may have."""
        return 0 if turn.chunk else min(self.scheduler.budget(turn.request), turn.rows - 1)

    def _room(self, request: Request) -> int:
        return request.room(self.config.drafter.block, self.model.max_position_embeddings)

    def _grow(self, turns: Sequence[Turn], proposals: Mapping[int, Proposal]) -> dict[int, Grown]:
        """The trees of this round, by request; of what was not drafted for, the root alone."""
        grown = {turn.request.id: self._tree(turn, proposals.get(turn.request.id)) for turn in turns if not turn.chunk}
        return self.widths.cut(turns, grown, self._spent["draft"]) if self.widths else grown

    def _tree(self, turn: Turn, proposal: Proposal | None) -> Grown:
        root = turn.request.tokens[-1]
        if proposal is None:
            return Grown(Tree((root,), (ROOT,)), [0.0])
        return grow(self.config.drafter.shape, proposal, root, self._width(turn), self._room(turn.request))

    def _rows(self, turn: Turn, grown: Mapping[int, Grown]) -> SeqRows:
        return chunk(turn, self._most_scored) if turn.chunk else verify(turn.request, grown[turn.request.id].tree)

    # ------------------------------------------------------------------ what came of it

    def _settle(self, turn: Turn, rows: SeqRows, picked: Picked) -> Outcome:
        """Walk the request's tree and emit."""
        request, start = turn.request, turn.request.start
        if turn.chunk:
            kept = tuple(range(len(rows.tokens)))
            chooses = start + len(kept) == len(request.prompt) and not request.tokens
            new, at = list(picked.ids[-1:] if chooses else ()), [rows.pick - 1]
            request.scored = max(request.scored, start + len(kept))
        else:
            path = accept.walk(rows, picked.ids)
            kept, new = path.rows, [rows.tokens[row] for row in path.rows[1:]] + [path.bonus]
            at = list(kept)
        request.start += len(kept)
        request.forwards += 1
        broken = NO_TOKEN in new
        emitted, reason = request.extend(new[: -1 if broken else None], self.model.max_position_embeddings)
        if not turn.chunk:
            self._count(request, rows, min(len(kept) - 1, len(emitted)))
        move = Move(rows.seq, start, kept) if kept != tuple(range(len(kept))) else None
        first_scored = start + len(rows.tokens) - rows.pick
        broken = broken and reason is None
        if not broken:
            self.scheduler.keep(request)
        if request.matcher is not None:
            request.follow(emitted)
        return Outcome(
            request, kept, first_scored, picked, emitted, at[: len(emitted)], move, len(rows.scored), reason, broken
        )

    def _count(self, request: Request, rows: SeqRows, matched: int) -> None:
        depth = max(depths(rows.parents))
        request.count_round(depth, matched)
        if depth:
            self.accepted[matched] += 1
            self.tallies["tree_nodes"][len(rows.tokens) - 1] += 1
            self.tallies["tree_depth"][depth] += 1
            self.counters["rounds"] += 1
            self.counters["drafted"] += len(rows.tokens) - 1
            self.counters["accepted"] += matched
        if self.counters["rounds"] == _ALARM_ROUNDS and not self.counters["accepted"]:
            logger.warning("no draft token accepted in %d rounds: is the drafter wired to this model?", _ALARM_ROUNDS)

    def _commit(self, moves: Sequence[Move], ended: Sequence[Request], later: bool = False) -> None:
        """Tell the workers which rows to keep and which sequences to forget. later: while they draft, if they will."""
        released = [request.id for request in ended if self.scheduler.remove(request)]
        if moves or released:
            self.fleet.commit(moves, released, later=later and self._ranks_draft and not self.idle)
        for request in ended:
            self._close(request)

    def _close(self, request: Request) -> None:
        if request.id in self._drafting:
            self._drafting.remove(request.id)
            self.drafter.close(request.id)

    def _absorb(self, outcome: Outcome) -> None:
        if outcome.emitted and outcome.request.id in self._drafting:
            self.drafter.absorb(outcome.request.id, outcome.emitted)

    def _book(self, turns: Sequence[Turn]) -> None:
        for stage, spent in self._spent.items():
            self.seconds[stage] += spent
        for turn in turns:
            seconds = turn.request.seconds
            if turn.chunk:
                seconds["prefill"] += sum(self._spent.values())
            else:
                for stage, spent in self._spent.items():
                    seconds[stage] += spent


def _no_grammars(grammar: Grammar) -> Matcher:
    raise ValueError("grammar: this engine has none")


def _kept(rows: Sequence[SeqRows], outcomes: Sequence[Outcome]) -> Iterator[Kept]:
    """What the step has committed; not of a request that its NaN end, nor of plain decoding's, whose pages no draft
    meets."""
    first = 0
    for r, outcome in zip(rows, outcomes, strict=True):
        if not outcome.broken and outcome.request.speculate:
            yield Kept(r.seq, r.start, [first + row for row in outcome.kept], outcome.request.pages)
        first += len(r.tokens)
