"""What the server remembers of each open request: enough to go on with it in another engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from kdtp.messages import Failed, Finished, FromEngine, Refused, Scored, Tokens, Usage
from kdtp.server.watcher import Watcher
from kdtp.types import SamplingParams

Told = Tokens | Scored | Finished | Failed | Refused


class Extra(NamedTuple):
    """What Submit has beside prompt and parameters."""

    speculate: bool = True
    budget: int | None = None
    priority: int = 0
    salt: str = ""


@dataclass(eq=False)
class Job:
    """One request to the engine, and what has come of it.

    tell: called with each event, in the server's event loop; ends: ids that end the text; id: of the HTTP request;
    choice: which of its choices. watchers: who looks at its rounds.
    given, scored: tokens and prompt log-probabilities told so far; label: its name in the engine that runs now;
    accepted: an engine took it; deaths: of engines that had it. started, heard: when it came, and when its last tokens
    did, of time.monotonic.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    tell: Callable[[Told], object]
    ends: Collection[int] = ()
    id: str = ""
    choice: int = 0
    extra: Extra = field(default_factory=Extra)
    started: float = field(default_factory=time.monotonic)
    heard: float | None = None
    given: list[int] = field(default_factory=list)
    scored: int = 0
    label: int | None = None
    accepted: bool = False
    deaths: int = 0
    watchers: list[Watcher] = field(default_factory=list)

    def note(self, event: FromEngine) -> Told | None:
        """What is new in an event; an engine that took over may say some of it again."""
        match event:
            case Tokens():
                return self._tokens(event)
            case Scored():
                skip = max(0, self.scored + 1 - event.position)
                new = event.logprobs[skip:]
                self.scored += len(new)
                return msgspec.structs.replace(event, position=event.position + skip, logprobs=new) if new else None
            case Finished() | Failed() | Refused():
                return event
        raise AssertionError(event)

    def _tokens(self, event: Tokens) -> Tokens | Failed | None:
        skip = len(self.given) - event.position
        if skip < 0:  # a bug; the text would have a hole
            return Failed(event.request, "engine", f"token {len(self.given)} is missing, {event.position} came")
        self.accepted = True
        new = event.tokens[skip:]
        self.given += new
        at = event.position + skip
        return msgspec.structs.replace(event, position=at, tokens=new, logprobs=event.logprobs[skip:]) if new else None

    def end_watchers(self) -> None:
        """Whoever looks at its rounds has seen all."""
        for watcher in self.watchers:
            watcher.end()

    def outlive(self) -> None:
        """Its engine has died: the next one must not refuse it."""
        self.label, self.accepted = None, True
        self.deaths += 1

    def finished(self, context: int) -> Finished | None:
        """The end, if all was given before the engine could say so. context: the model's longest text."""
        count = len(self.given)
        if not count:
            return None
        if self.given[-1] in self.ends and count > self.params.min_tokens:
            reason = "stop"
        elif count >= self.params.max_tokens or len(self.prompt) + count > context:
            reason = "length"
        else:
            return None
        return Finished(0, reason, Usage(prompt_tokens=len(self.prompt), completion_tokens=count))
