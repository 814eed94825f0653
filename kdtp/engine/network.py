"""A network that drafts, at the coordinator's end: on the ranks beside the target, or whole in the coordinator."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from msgspec.structs import replace

from kdtp.config import EngineConfig
from kdtp.draft.base import Kept
from kdtp.draft.dflash import config as configs
from kdtp.draft.dflash import frames
from kdtp.draft.dflash.backlog import Backlog
from kdtp.draft.dflash.drafter import Network
from kdtp.draft.dflash.network import Block, DFlash, Drafted, TargetPart
from kdtp.draft.dflash.part import lines
from kdtp.drafting import Root, Rows
from kdtp.engine import features
from kdtp.engine.fleet import Fleet
from kdtp.engine.link import EngineFault
from kdtp.model.comm import Solo
from kdtp.model.weights.load import Weights, open_model
from kdtp.proposals import Conditionals, Grown, Marginals
from kdtp.types import MOST_THREADS, WIDE, page_rows


def placed(config: EngineConfig, fleet: Fleet) -> Network:
    """The network where `config` wants it; nothing is loaded yet."""
    return OnCoordinator(config, fleet) if config.drafter.placement == "coordinator" else OnRanks(fleet)


class OnRanks:
    """Sharded over the ranks, which load it with the target: what they draft is the same on all."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def start(self) -> None:
        """The ranks have it ready."""

    def keep(self, kept: Sequence[Kept]) -> None:
        """As Network; the ranks know the pages."""
        self._fleet.keep([Rows(each.seq, each.start, tuple(each.rows)) for each in kept])

    def root(self, root: Root, pages: Sequence[int], told: bool) -> Root:
        """As Network: pages that a forward has told are known."""
        return root if told else replace(root, pages=tuple(pages))

    def draft(self, roots: Sequence[Root], shape: str) -> Sequence[Marginals | Conditionals | Grown]:
        """As Network. EngineFault as Fleet.draft."""
        drafted, frame = self._fleet.draft(roots, shape)
        try:
            return frames.unpack(drafted, frame)
        except ValueError as error:
            raise EngineFault(f"step {self._fleet.step}: {error}") from None


class OnCoordinator:
    """Whole in this process, on a CPU, with an embedding and a head of its own; features are read where rank 0 leaves
    them."""

    def __init__(self, config: EngineConfig, fleet: Fleet) -> None:
        self._config, self._fleet = config, fleet
        self._features: torch.Tensor | None = None

    def start(self) -> None:
        """Load it. Errors as Weights of both."""
        config, drafter = self._config, self._config.drafter
        folder = Path(drafter.model)
        self._settings = configs.read(folder, drafter.amplitude or None, drafter.window)
        if config.tp > 1:  # then the rank in this process has set them
            many = config.threads or (os.cpu_count() or 1 if self._settings.hidden_size >= WIDE else 1)
            torch.set_num_threads(min(MOST_THREADS, many))
        with open_model(config.model) as source:
            weights = Weights(source, 0, 1, config.dtype, lambda done, total: None)
            target = TargetPart(weights.take("embed"), weights.matrix("head"), 0)
        self._network = DFlash(folder, self._settings, target, Solo(), config.kv_tokens)
        self._backlog = Backlog(self._network, self._settings.features, target.embed.dtype)

    def keep(self, kept: Sequence[Kept]) -> None:
        """As Network."""
        taken = [row for each in kept for row in each.rows]
        if not taken:
            return
        positions = [p for each in kept for p in range(each.start, each.start + len(each.rows))]
        rows = [row for each in kept for row in page_rows(each.pages, each.start, len(each.rows))]
        self._backlog.add(self._left(), taken, positions, rows)

    def root(self, root: Root, pages: Sequence[int], told: bool) -> Root:
        """As Network."""
        return replace(root, pages=tuple(pages))

    def draft(self, roots: Sequence[Root], shape: str) -> Sequence[Marginals | Conditionals | Grown]:
        """As Network."""
        self._backlog.flush()
        blocks = [Block(root.token, lines(root.pages, root.start), root.budget, root.depth) for root in roots]
        asked, nodes = self._network.gather(blocks), 1 + max(root.budget for root in roots)
        found = frames.draft(self._network, asked, self._config.drafter.topk, shape, nodes)
        if isinstance(found, Drafted):
            return found.proposals()
        size, fetch = frames.pack(found)
        return frames.unpack(size, fetch())

    def _left(self) -> torch.Tensor:
        """What the last forward has left. EngineFault if rank 0's memory cannot be mapped."""
        if self._features is None:
            pid, fd = self._fleet.features
            dtype = getattr(torch, self._config.dtype)
            try:
                self._features = features.opened(pid, fd, self._settings.features, dtype)
            except (OSError, ValueError) as error:
                raise EngineFault(f"the features of rank 0 (pid {pid}) cannot be mapped: {error}") from None
        return self._features
