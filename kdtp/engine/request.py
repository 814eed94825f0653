"""One request, from submit to its end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kdtp.engine.pages import empty_text, page_key
from kdtp.messages import Begin, Usage
from kdtp.spec.grammar import Matcher
from kdtp.types import PAGE_ROWS, Rule, SamplingParams

STAGES = ("prefill", "draft", "build", "verify", "accept", "commit")
GREEDY = Rule()


@dataclass(eq=False)
class Request:
    """One request, from submit to its end. `id` also names its sequence on the workers.

    speculate, budget (tree nodes below the root; None: the engine's), priority (higher runs first), salt (of its
    prefix: only requests of one salt share pages) change what it costs and when it comes, never its text.
    matcher: its grammar, if it has one, where its text stands.

    Where it stands: start: rows of KV committed; tokens: emitted so far, of which the last is the root (it has no KV
    yet); pages: its part of the pool, of which the workers know the first `sent`; kept: pages of its text that are
    known by content; scored: prompt rows whose log-probabilities were told; begun: whether the workers know it;
    untold: newest tokens of which the workers do not know that they were emitted.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    speculate: bool = True
    want_logits: bool = False
    budget: int | None = None
    priority: int = 0
    salt: str = ""
    matcher: Matcher | None = None
    # Set by the scheduler when it is submitted.
    order: int = 0
    stops: frozenset[int] = frozenset()
    rule: Rule = GREEDY
    # Where it stands.
    start: int = 0
    tokens: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    sent: int = 0
    kept: int = 0
    scored: int = 0
    begun: bool = False
    untold: int = 0
    # What it has cost.
    submitted: float = field(default_factory=time.monotonic)
    queued: float = 0.0
    cached: int = 0
    preemptions: int = 0
    rounds: int = 0
    forwards: int = 0
    committed: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    _keys: list[bytes] = field(default_factory=list)

    @property
    def rank(self) -> tuple[int, int]:
        """Its place among all: the lowest is admitted first and preempted last."""
        return -self.priority, self.order

    @property
    def goal(self) -> int:
        """Rows that must be committed before the next token is chosen by a tree: all but the root's."""
        return len(self.prompt) + max(0, len(self.tokens) - 1)

    @property
    def prefilling(self) -> bool:
        """Whether it is to run a chunk of its text next: its prompt, or what it lost when it was preempted."""
        return self.start < self.goal

    def span(self, first: int, last: int) -> tuple[int, ...]:
        """Tokens first .. last - 1 of its text, prompt and emitted."""
        length = len(self.prompt)
        if last <= length:
            return self.prompt[first:last]
        return self.prompt[first:] + tuple(self.tokens[max(0, first - length) : last - length])

    def keys(self, pages: int) -> list[bytes]:
        """The keys of the empty text and of the first `pages` pages of its text."""
        if not self._keys:
            # Plain decoding is what speculation is checked against: it meets no row that speculation has left.
            self._keys.append(empty_text(self.salt, self.speculate))
        for page in range(len(self._keys) - 1, pages):
            self._keys.append(page_key(self._keys[-1], self.span(page * PAGE_ROWS, (page + 1) * PAGE_ROWS)))
        return self._keys[: pages + 1]

    def forget(self) -> None:
        """Lose all rows; what was emitted stays."""
        self.start, self.pages, self.sent, self.kept, self.begun = 0, [], 0, 0, False

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
        if self.params.max_tokens == 0:
            return emitted, None if self.prefilling else "length"
        for token in chosen:
            emitted.append(token)
            self.tokens.append(token)
            self.untold += 1
            if token in self.stops:
                return emitted, "stop"
            if len(self.tokens) == self.params.max_tokens:
                return emitted, "length"
        # The new root would be run at position `start`.
        return emitted, "length" if self.start >= max_positions else None

    @cached_property
    def best(self) -> int:
        """How many of the best ids its rows must say beside the picked one; -1: no log-probabilities are wanted."""
        wanted = (self.params.logprobs, self.params.prompt_logprobs)
        return max(-1 if best is None else best for best in wanted)

    def follow(self, emitted: Sequence[int]) -> None:
        """Advance the grammar; an end needs no more."""
        assert self.matcher is not None, "a request without a grammar"
        for token in emitted:
            if token not in self.stops:
                self.matcher.advance(token)

    def begin(self) -> Begin:
        """What the workers must know before its first rows."""
        self.begun, self.untold = True, 0
        texts = (self.prompt, tuple(self.tokens)) if self.rule.counts else ((), ())
        return Begin(self.id, len(self.prompt), self.rule, *texts, self.best)

    def tell(self) -> tuple[int, ...]:
        """The emitted tokens that the workers have not counted yet, if they count."""
        told, self.untold = self.untold, 0
        return tuple(self.tokens[len(self.tokens) - told :]) if told and self.rule.counts else ()

    def tell_pages(self) -> tuple[int, ...]:
        """The pages of which the workers do not know yet."""
        if self.sent == len(self.pages):
            return ()
        first, self.sent = self.sent, len(self.pages)
        return tuple(self.pages[first:])

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
            cached_tokens=self.cached,
            completion_tokens=len(self.tokens),
            preemptions=self.preemptions,
            rounds=self.rounds,
            forwards=self.forwards,
            committed=self.committed,
            drafted_by_depth=tuple(self.drafted),
            accepted_by_depth=tuple(self.accepted),
            timings_ms=milliseconds,
            queued_ms=round(self.queued * 1e3, 3),
        )
