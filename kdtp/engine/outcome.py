"""What one step did to one request, and what its client is told of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from kdtp.engine.limits import no_choice
from kdtp.engine.request import Request
from kdtp.engine.scheduler import Turn
from kdtp.messages import Failed, Finished, Ids, Refused, Scored, Tokens
from kdtp.types import Logprob, Move, SeqRows
from kdtp.watch import Round

_BYTES = 4  # of a float32 logit


class Event(NamedTuple):
    """Something to tell the client of a request; `logits` are raw float32 bytes, if it asked for them."""

    message: Tokens | Scored | Round | Finished | Failed | Refused
    logits: bytes | None = None


class Picked(NamedTuple):
    """One request's part of the step's answer: the ids of its picked rows, the place of the first among all rows, and
    what is known of their probabilities, if it asked."""

    ids: Sequence[int]
    first: int
    logprobs: Sequence[Logprob]


def parts(turns: Sequence[Turn], rows: Sequence[SeqRows], answer: Ids) -> Iterator[Picked]:
    """The answer, cut up by request."""
    first = told = 0
    for turn, r in zip(turns, rows, strict=True):
        known = r.pick if turn.request.best >= 0 else 0
        yield Picked(answer.ids[first : first + r.pick], first, answer.logprobs[told : told + known])
        first, told = first + r.pick, told + known


class Outcome(NamedTuple):
    """What one step did to one request.

    kept: of its rows in the step, those that stay; first: its first picked row; at: of the picked rows, those that
    chose the emitted tokens; move: rows to move; scored: how many prompt tokens behind row `first` the picked rows tell
    of; broken: no token could be chosen.
    """

    request: Request
    kept: Sequence[int]
    first: int
    picked: Picked
    emitted: list[int]
    at: list[int]
    move: Move | None
    scored: int
    reason: str | None
    broken: bool

    @property
    def ended(self) -> bool:
        """Whether this was the request's last step."""
        return self.broken or self.reason is not None

    def events(self, logits: bytes | None, vocab_size: int) -> Iterator[Event]:
        """What to tell the client; logits: of all the step's picked rows, if somebody asked."""
        request, params = self.request, self.request.params
        if self.scored:
            scored = _best(self.picked.logprobs[: self.scored], params.prompt_logprobs)
            yield Event(Scored(request.id, self.first + 1, scored))
        if self.emitted:
            known: tuple[Logprob, ...] = ()
            if params.logprobs is not None:
                known = _best([self.picked.logprobs[row] for row in self.at], params.logprobs)
            raw = self._raw(logits, _BYTES * vocab_size) if request.want_logits and logits is not None else None
            shape = None if raw is None else (len(self.emitted), vocab_size)
            position = len(request.tokens) - len(self.emitted)
            yield Event(Tokens(request.id, position, tuple(self.emitted), known, shape), raw)
        if self.broken:
            yield Event(self._failed(vocab_size))
        elif self.reason is not None:
            yield Event(Finished(request.id, self.reason, request.usage()))

    def _raw(self, logits: bytes, row: int) -> bytes:
        places = [self.picked.first + at for at in self.at]
        return b"".join(logits[i * row : (i + 1) * row] for i in places)

    def _failed(self, vocab_size: int) -> Failed:
        request, after = self.request, f"after {len(self.request.tokens)} tokens"
        if problem := no_choice(request, vocab_size):
            return Failed(request.id, "invalid", f"{problem}, {after}")
        cause = "the model's logits hold NaN"
        return Failed(request.id, "no_token", f"no token at position {request.start}, {after}: {cause}")


def _best(logprobs: Sequence[Logprob], count: int | None) -> tuple[Logprob, ...]:
    """Cut to what was asked for: one request may want more for its prompt than for its output."""
    return tuple(
        known if len(known.best) == count else msgspec.structs.replace(known, best=known.best[: count or 0])
        for known in logprobs
    )
