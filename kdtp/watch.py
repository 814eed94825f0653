"""What an engine shows of the rounds of a request that somebody watches."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from kdtp.types import NO_TOKEN, Count, Token

MOST_ROUNDS = 1024  # that one Watch can ask for


class Watch(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Show the next `rounds` rounds of one of the sender's open requests; 0: no more.

    A watcher that does not ask again is shown no more, so a slow or dead one never has more than that under way. One
    unknown label, such as of a request that has just ended, is ignored.
    """

    request: Count
    rounds: Annotated[int, Meta(ge=0, le=MOST_ROUNDS)]


class Round(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """One verified tree; it comes before the Tokens that came of it.

    position: tokens emitted before; tokens, parents [M]: as in Tree; scores [M]: log-probability of each node's path
    under the drafter, root 0; path: the accepted nodes, root first; bonus: the target's choice behind the last, or
    NO_TOKEN; timings_ms: of the whole step, by stage.
    """

    request: Count
    position: Count
    tokens: tuple[Token, ...]
    parents: tuple[int, ...]
    scores: tuple[float, ...]
    path: tuple[Count, ...]
    bonus: Annotated[int, Meta(ge=NO_TOKEN, lt=2**31)]
    timings_ms: dict[str, float]
