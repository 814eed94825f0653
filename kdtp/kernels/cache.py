"""Writing and compacting rows of the latent KV cache."""

from __future__ import annotations

import torch

from kdtp.kernels import cuda
from kdtp.kernels.check import FLOATS, INDEX, check


def kv_write(kv: torch.Tensor, rows: torch.Tensor, new: torch.Tensor) -> None:
    """kv[rows[i]] = new[i], in place.

    kv [N, D], rows int64 [M], distinct, new [M, D] of kv's dtype. Raises as kernels.check.
    """
    check("kv_write", "kv", kv, FLOATS, None, None)
    check("kv_write", "rows", rows, INDEX, None)
    check("kv_write", "new", new, (kv.dtype,), rows.shape[0], kv.shape[1])
    kv.index_copy_(0, rows, new)


def kv_move(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor) -> None:
    """kv[:, target[i]] = kv[:, source[i]] for all layers, in place; every source is read before any write of its group.

    kv [layers, N, D], source, target int64 [n], targets distinct; offsets int32 [groups + 1]: where each group begins,
    and n; no group reads what another writes. Raises as kernels.check.
    """
    if kv.is_cuda:
        cuda.kv_move(kv, source, target, offsets)
        return
    check("kv_move", "kv", kv, FLOATS, None, None, None)
    check("kv_move", "source", source, INDEX, None)
    check("kv_move", "target", target, INDEX, source.shape[0])
    check("kv_move", "offsets", offsets, (torch.int32,), None)
    kv.index_copy_(1, target, kv.index_select(1, source))
