"""A network and a lookup in the text, merged into one proposal."""

from __future__ import annotations

from collections.abc import Sequence

from kdtp.draft.base import Ask, Drafter, Kept
from kdtp.proposals import Grown, Merged, Proposal, Trie


class Both:
    """What `network` proposes and, where the text has been there before, what `lookup` does."""

    def __init__(self, network: Drafter, lookup: Drafter) -> None:
        self._network, self._lookup = network, lookup

    def start(self) -> None:
        """Get both ready."""
        self._network.start()
        self._lookup.start()

    def admit(self, seq: int, tokens: Sequence[int], cached: int) -> None:
        """Both follow it."""
        self._network.admit(seq, tokens, cached)
        self._lookup.admit(seq, tokens, cached)

    def keep(self, kept: Sequence[Kept]) -> None:
        """For both."""
        self._network.keep(kept)
        self._lookup.keep(kept)

    def absorb(self, seq: int, tokens: Sequence[int]) -> None:
        """For both."""
        self._network.absorb(seq, tokens)
        self._lookup.absorb(seq, tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal | None]:
        """The network's proposal, merged with the lookup's if there is one."""
        pairs = zip(self._network.propose(asks), self._lookup.propose(asks), strict=True)
        return [_merged(network, lookup) for network, lookup in pairs]

    def close(self, seq: int) -> None:
        """Both forget it."""
        self._network.close(seq)
        self._lookup.close(seq)


def _merged(network: Proposal | None, lookup: Proposal | None) -> Proposal | None:
    if network is None or lookup is None:
        return lookup if network is None else network
    assert isinstance(lookup, Trie) and not isinstance(network, Trie | Merged | Grown)
    return Merged(network, lookup)
