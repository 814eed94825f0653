"""One rank's part of a DFlash drafter beside its shard of the target: it does what messages say and decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kdtp.config import DrafterConfig
from kdtp.draft.base import Target
from kdtp.draft.dflash import config as configs
from kdtp.draft.dflash import frames
from kdtp.draft.dflash.backlog import Backlog
from kdtp.draft.dflash.frames import Frame
from kdtp.draft.dflash.graphs import MOST_SEQS, Graphs
from kdtp.draft.dflash.network import Block, DFlash, TargetPart
from kdtp.drafting import Root, Rows
from kdtp.types import PAGE_ROWS

if TYPE_CHECKING:
    from kdtp.model.comm import Comm


class Part:
    """The network's context has the pages of the target's KV cache: what the prefix cache shares, it shares too.

    Loads the network and taps the target, so it comes before the target's first forward and its graphs. Collectives
    inside: every rank makes the same calls. Errors as dflash.config.read and Weights.
    """

    def __init__(self, config: DrafterConfig, target: Target, comm: Comm) -> None:
        folder = Path(config.model)
        network = configs.read(folder, config.amplitude or None, config.window)
        own = TargetPart(target.embed, target.head, target.vocab_start)
        self._target, self._topk, self._answers = target, config.topk, comm.rank == 0
        self._shape, self._nodes = config.grown(target.embed.is_cuda), 1 + config.budget  # of trees, usually
        self._network = DFlash(folder, network, own, comm, target.rows)
        self._backlog = Backlog(self._network, network.features, target.embed.dtype)
        self._graphs: Graphs | None = None
        self._drafted = False  # since the last forward but one
        target.tap(network.target_layer_ids)

    def capture(self, seqs: int) -> None:
        """From now on run in CUDA graphs; captured now: for up to `seqs` short texts."""
        self._graphs = self._backlog.graphs = Graphs(self._network, self._topk, self._backlog.features)
        self._graphs.capture_usual(seqs, self._shape, self._nodes if self._shape else 0)

    def keep(self, kept: Sequence[Rows]) -> None:
        """Take the last forward's features at these rows into the context, at the latest before the next draft."""
        features = self._target.features
        assert features is not None, "a forward without features"
        taken = [row for each in kept for row in each.rows]
        if not taken:
            return
        positions = [p for each in kept for p in range(each.start, each.start + len(each.rows))]
        rows = [row for each in kept for row in self._target.places(each.seq, each.start, len(each.rows))]
        self._backlog.add(features, taken, positions, rows)
        if self._drafted and features.is_cuda:
            self._backlog.flush()  # a draft will come again, and until then the GPU has nothing to do
        self._drafted = False

    def draft(self, roots: Sequence[Root], shape: str) -> Frame | None:
        """What the message Drafts says of each, on the rank that answers."""
        self._backlog.flush()
        self._drafted = True
        blocks = [Block(root.token, self._line(root), root.budget, root.depth) for root in roots]
        nodes = max(self._nodes, *(1 + root.budget for root in roots)) if shape else 0
        if self._graphs is not None and len(blocks) <= MOST_SEQS:
            found = self._graphs.draft(blocks, shape, nodes)
        else:
            asked = self._network.gather(blocks).to(self._network.device, non_blocking=True)
            found = frames.draft(self._network, asked, self._topk, shape, nodes)
        return frames.pack(found) if self._answers else None

    def _line(self, root: Root) -> torch.Tensor:
        """The context row of each row before the root."""
        return lines(root.pages, root.start) if root.pages else self._target.line(root.seq, root.start)


def lines(pages: Sequence[int], count: int) -> torch.Tensor:
    """The context row of each of the first `count` rows in `pages`, int64 [count]."""
    return (torch.tensor(pages)[:, None] * PAGE_ROWS + torch.arange(PAGE_ROWS)).flatten()[:count]


def taps(config: DrafterConfig) -> tuple[int, ...]:
    """The layers of the target that the network reads."""
    return configs.read(Path(config.model)).target_layer_ids
