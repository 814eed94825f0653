"""From logits that the ranks share to the best candidates of each depth, scored alone or after one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

from kdtp import kernels

if TYPE_CHECKING:
    from kdtp.model.comm import Comm


class Best(NamedTuple):
    """The K best ids of each row by (logit descending, id ascending): logits float32 [R, K], ids int64 [R, K];
    log_z [R, 1]: logsumexp over the whole vocabulary, NaN or +inf where the row is unusable."""

    logits: torch.Tensor
    ids: torch.Tensor
    log_z: torch.Tensor

    @property
    def usable(self) -> torch.Tensor:
        """Rows, [R, 1]."""
        return ~(self.log_z.isnan() | (self.log_z == torch.inf))


def best(logits: torch.Tensor, k: int, first: int, comm: Comm) -> Best:
    """The best of all ranks' logits, on each of them; logits float32 [R, n]: of ids first .. first + n - 1."""
    width = min(k, logits.shape[1])
    _, ids = kernels.topk_logsumexp(logits, width)
    values = functional.pad(logits.gather(1, ids), (0, k - width), value=-torch.inf)
    ids = functional.pad(ids + first, (0, k - width))
    # One collective for all: float32 holds ids of up to 2^24 exactly, and there are no more.
    own = torch.cat([values, ids.float(), logits.logsumexp(1, keepdim=True)], 1)
    found = comm.all_gather(own).transpose(0, 1)  # [R, ranks, 2 k + 1]
    # Ranks hold ascending ids, so a stable sort of their lists in rank order leaves the lower of equals first.
    values, ids = found[..., :k].flatten(1), found[..., k:-1].flatten(1).long()
    order = values.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return Best(values.gather(1, order), ids.gather(1, order), found[..., -1].logsumexp(1, keepdim=True))


def log_probabilities(found: Best) -> torch.Tensor:
    """Under the softmax of the whole vocabulary, [R, K], as kernels.topk_logsumexp gives them."""
    lp = (found.logits - found.log_z).masked_fill_(found.logits == -torch.inf, -torch.inf).clamp_(max=0.0)
    return lp.masked_fill_(~found.usable, torch.nan)


@dataclass(frozen=True)
class Selector:
    """DFlash2's candidate selector: codebooks [V, rank], w_hidden [H, rank]. Every rank does all of it."""

    predecessor: torch.Tensor
    successor: torch.Tensor
    w_hidden: torch.Tensor

    def __call__(self, found: Best, hidden: torch.Tensor, roots: torch.Tensor) -> torch.Tensor:
        """Log-probabilities among a depth's candidates after each of the depth before, float32 [B, L, K, K].

        found, hidden [B * L, H]: of L depths of each sequence; roots int64 [B]: what precedes the first. NaN where a
        row is unusable.
        """
        batch, k = len(roots), found.ids.shape[1]
        ids = found.ids.view(batch, -1, k)
        before = torch.cat([roots[:, None, None].expand(-1, 1, k), ids[:, :-1]], 1)
        gate = kernels.linear(hidden, self.w_hidden).view(batch, -1, 1, self.w_hidden.shape[1])
        edges = (self.predecessor[before] * gate) @ self.successor[ids].mT
        logits = found.logits.where(found.usable, torch.nan).view(batch, -1, 1, k)
        return (logits + edges.float()).log_softmax(-1)
