"""Log-probabilities under the model's own distribution, before any rule: equal with and without a tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtp import kernels
from kdtp.types import Logprob


def logprobs(logits: torch.Tensor, tokens: Sequence[int], best: Sequence[int]) -> list[Logprob]:
    """Of each row of the unedited float32 [R, V]: its token, and so many of the best ids by (logit, id).

    The token may be NO_TOKEN; what is then said of it means nothing.
    """
    ids = torch.tensor(tokens, device=logits.device).clamp(min=0)[:, None]
    # A row's own sum, whatever the number of rows; logsumexp promises no such thing.
    law = logits.log_softmax(dim=1)
    own = logits.gather(1, ids)
    vocabulary = torch.arange(logits.shape[1], device=logits.device)
    rank = 1 + ((logits > own) | ((logits == own) & (vocabulary < ids))).sum(dim=1)
    _, top = kernels.topk_logsumexp(logits, max(1, *best))
    found = zip(tokens, law.gather(1, ids)[:, 0].tolist(), rank.tolist(), strict=True)
    tops = zip(top.tolist(), law.gather(1, top).tolist(), best, strict=True)
    return [
        Logprob(token, value, place, tuple(zip(top_ids[:n], top_values[:n], strict=True)))
        for (token, value, place), (top_ids, top_values, n) in zip(found, tops, strict=True)
    ]
