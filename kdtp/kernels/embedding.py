"""Rows of a vocabulary shard."""

from __future__ import annotations

import torch

from kdtp.kernels import cuda
from kdtp.kernels.check import FLOATS, INDEX, check


def embedding(ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """The embedding of each id that this shard holds, zeros for the others, so that shards add up.

    ids int64 [M]; weight [n, H]: the rows of ids first .. first + n - 1 -> [M, H] of weight's dtype.
    Raises as kernels.check.
    """
    if weight.is_cuda:
        return cuda.embedding(ids, weight, first)
    check("embedding", "ids", ids, INDEX, None)
    check("embedding", "weight", weight, FLOATS, None, None)
    local = ids - first
    here = (local >= 0) & (local < weight.shape[0])
    rows = weight.index_select(0, local.where(here, 0)) if weight.shape[0] else weight.new_zeros(1, weight.shape[1])
    return rows.where(here[:, None], 0)
