"""One request, from submit to its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kdtp.messages import Begin, Usage
from kdtp.types import Rule, SamplingParams

STAGES = ("prefill", "draft", "build", "verify", "accept", "commit")
GREEDY = Rule()


@dataclass
class Request:
    """One request, from submit to its end. `id` also names its sequence on the workers.

    start: rows of KV committed; tokens: emitted so far, of which the last is the root (it has no KV yet);
    stops: token ids that end it; rule: how its tokens are chosen; pages: its part of the pool, taken when it is
    admitted; untold: newest tokens of which the workers do not know that they were emitted.
    """

    id: int
    prompt: tuple[int, ...]
    params: SamplingParams
    speculate: bool = True
    want_logits: bool = False
    stops: frozenset[int] = frozenset()
    rule: Rule = GREEDY
    start: int = 0
    tokens: list[int] = field(default_factory=list)
    pages: tuple[int, ...] = ()
    pages_sent: bool = False
    untold: int = 0
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

    @property
    def best(self) -> int:
        """How many of the best ids its rows must say beside the picked one; -1: no log-probabilities are wanted."""
        wanted = (self.params.logprobs, self.params.prompt_logprobs)
        return max(-1 if best is None else best for best in wanted)

    def begin(self) -> Begin:
        """What the workers must know before its first rows."""
        self.untold = 0
        texts = (self.prompt, tuple(self.tokens)) if self.rule.counts else ((), ())
        return Begin(self.id, len(self.prompt), self.rule, *texts, self.best)

    def tell(self) -> tuple[int, ...]:
        """The emitted tokens that the workers have not counted yet, if they count."""
        told, self.untold = self.untold, 0
        return tuple(self.tokens[len(self.tokens) - told :]) if told and self.rule.counts else ()

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
