"""The best candidates of a row of logits."""

from __future__ import annotations

import torch

from kdtp.kernels import cuda
from kdtp.kernels.check import FLOAT32, check


def topk_logsumexp(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best ids of each row, by (logit descending, id ascending), with their log-probabilities.

    logits float32 [R, V], k >= 1 -> lp float32 [R, K], ids int64 [R, K], K = min(k, V). lp is the log-softmax over
    all V, never above 0; -inf for a candidate whose logit is. A row whose logsumexp is NaN or +inf is unusable: its lp
    are NaN. Raises as kernels.check, ValueError for k.
    """
    if logits.is_cuda:
        return cuda.topk_logsumexp(logits, k)
    check("topk_logsumexp", "logits", logits, FLOAT32, None, None)
    if k < 1:
        raise ValueError(f"topk_logsumexp: k = {k}: must be at least 1")
    log_z = logits.logsumexp(-1, keepdim=True)
    # Checked before ranking: topk puts NaN above every number.
    broken = log_z.isnan() | (log_z == torch.inf)
    clean = logits.masked_fill(broken, 0.0)
    ids = _best(clean, min(k, logits.shape[1]))
    value = clean.gather(1, ids)
    lp = (value - log_z).masked_fill_(value == -torch.inf, -torch.inf).clamp_(max=0.0)
    return lp.masked_fill_(broken, torch.nan), ids


def _best(x: torch.Tensor, k: int) -> torch.Tensor:
    # topk leaves open which of several equal values it takes; those above the k-th value are certain, the rest are
    # the first equal ones.
    kth = x.topk(k).values[:, -1:]
    above, equal = x > kth, x == kth
    room = k - above.sum(-1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(-1) <= room))
    ids = chosen.nonzero()[:, 1].view(-1, k)
    order = x.gather(1, ids).sort(descending=True, stable=True).indices
    return ids.gather(1, order)
