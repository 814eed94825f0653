"""Somebody who looks at the rounds of a request as they come."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator

from kdtp.watch import Round

_MOST = 8  # rounds that wait for a slow reader: the newest ones


class Watcher:
    """A bounded queue of rounds: who reads too slowly misses the oldest. For the event loop alone.

    count: rounds that came so far, so that a reader sees how many he missed.
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[int, Round]] = deque(maxlen=_MOST)
        self._news = asyncio.Event()
        self._ended = False
        self.count = 0

    def show(self, round_: Round) -> None:
        """One more."""
        self.count += 1
        self._rounds.append((self.count, round_))
        self._news.set()

    def end(self) -> None:
        """No more will come."""
        self._ended = True
        self._news.set()

    async def rounds(self, silence: float) -> AsyncIterator[tuple[int, Round] | None]:
        """Each round that has not been dropped, and its number, until the end; None after a silence of so many
        seconds."""
        while self._rounds or not self._ended:
            if self._rounds:
                yield self._rounds.popleft()
                continue
            self._news.clear()
            try:
                await asyncio.wait_for(self._news.wait(), silence)
            except TimeoutError:
                yield None
