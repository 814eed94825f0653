"""DFlash as a drafter of the engine: it follows committed rows by page, and drafts for all who ask in one forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from kdtp.config import DrafterConfig
from kdtp.draft.base import Ask, Kept, Target
from kdtp.draft.dflash import config as configs
from kdtp.draft.dflash.network import Block, DFlash, TargetPart
from kdtp.model.comm import Solo
from kdtp.proposals import Conditionals, Marginals, Proposal
from kdtp.types import PAGE_ROWS


@dataclass
class _Follow:
    """One sequence: its newest token, how many tokens it has, and how many rows (not yet the newest token's)."""

    root: int
    tokens: int
    length: int


class DFlashDrafter:
    """The network's context has the pages of the target's KV cache: what the prefix cache shares, it shares too."""

    def __init__(self, config: DrafterConfig, target: Callable[[], Target]) -> None:
        self._config = config
        self._network_config = configs.read(Path(config.model), config.amplitude or None, config.window)
        self._find_target = target
        self._seqs: dict[int, _Follow] = {}

    def start(self) -> None:
        """Load the network and tap the target. Errors as Weights."""
        self._target = self._find_target()
        part = TargetPart(self._target.embed, self._target.head, self._target.vocab_start)
        folder = Path(self._config.model)
        self._network = DFlash(folder, self._network_config, part, Solo(), self._target.rows)
        self._target.tap(self._network_config.target_layer_ids)

    def admit(self, seq: int, tokens: Sequence[int], cached: int) -> None:
        """Features of cached tokens lie in their pages, since the forward that ran them."""
        assert seq not in self._seqs, f"sequence {seq} is open"
        self._seqs[seq] = _Follow(tokens[-1], len(tokens), cached)

    def keep(self, kept: Sequence[Kept]) -> None:
        """Project the features of the rows that stay into their pages."""
        assert self._target.features is not None, "a forward without features"
        positions = [p for each in kept for p in range(each.start, each.start + len(each.rows))]
        pages = [each.pages for each in kept for _ in each.rows]
        rows = [own[p // PAGE_ROWS] * PAGE_ROWS + p % PAGE_ROWS for own, p in zip(pages, positions, strict=True)]
        if rows:
            taken = self._target.features[[row for each in kept for row in each.rows]]
            self._network.absorb(taken, torch.tensor(positions), torch.tensor(rows))
        for each in kept:
            if (follow := self._seqs.get(each.seq)) is not None:
                assert follow.length == each.start, f"sequence {each.seq}: {follow.length} rows, then from {each.start}"
                follow.length += len(each.rows)

    def absorb(self, seq: int, tokens: Sequence[int]) -> None:
        """The newest token is the next root."""
        follow = self._seqs[seq]
        follow.root, follow.tokens = tokens[-1], follow.tokens + len(tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Proposal | None]:
        """Marginals of version 1, Conditionals of version 2."""
        deepest = min(max(ask.depth for ask in asks), self._network_config.block_size - 1)
        blocks = [self._block(ask.seq, ask.pages) for ask in asks]
        found = self._network.draft(blocks, deepest, self._config.topk)
        return [_cut(proposal, ask.depth) for proposal, ask in zip(found, asks, strict=True)]

    def close(self, seq: int) -> None:
        """Forget a sequence; what its pages hold stays for those who share them."""
        del self._seqs[seq]

    def _block(self, seq: int, pages: Sequence[int]) -> Block:
        follow = self._seqs[seq]
        assert follow.length == follow.tokens - 1, f"sequence {seq}: {follow.length} rows of {follow.tokens} tokens"
        rows = (torch.tensor(pages)[:, None] * PAGE_ROWS + torch.arange(PAGE_ROWS)).flatten()
        assert len(rows) >= follow.length, f"sequence {seq}: {follow.length} rows in {len(pages)} pages"
        return Block(follow.root, rows[: follow.length])


def _cut(proposal: Marginals | Conditionals, depth: int) -> Proposal:
    return type(proposal)(proposal.lp[:depth], proposal.ids[:depth])
