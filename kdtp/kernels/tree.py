"""Draft trees on the GPU: built from a drafter's candidates, and walked by the target's choices.

CUDA tensors only; for CPU tensors kdtp.spec.tree and kdtp.spec.accept are the same functions, tree by tree.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kdtp.kernels.abi import library

WORD = 64  # nodes in a word of ancestor bits


class Trees(NamedTuple):
    """Trees of B sequences; entries behind a sequence's `counts` hold nothing.

    tokens int64 [B, M], parents int32 [B, M] (-1: the root), positions int32 [B, M], ancestors int64 [B, M, W]: bit j
    of a node's words says that node j is an ancestor of it or itself; counts int32 [B]: nodes, root included.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    positions: torch.Tensor
    ancestors: torch.Tensor
    counts: torch.Tensor


class Walks(NamedTuple):
    """What the target accepts of B trees.

    path int32 [B, M]: accepted nodes, root first, nothing behind a sequence's `lengths`; lengths int32 [B], root
    included; bonus int64 [B]: the choice at the last accepted node. A malformed tree has length 0 and bonus -1.
    """

    path: torch.Tensor
    lengths: torch.Tensor
    bonus: torch.Tensor


def tree_build(
    lp: torch.Tensor,
    ids: torch.Tensor,
    roots: torch.Tensor,
    budgets: torch.Tensor,
    depths: torch.Tensor,
    starts: torch.Tensor,
    max_nodes: int,
) -> Trees:
    """The trees of kdtp.spec.tree.build, bit for bit, without a round trip to the host.

    lp float32 [B, L, K], ids int64 [B, L, K]: as in Marginals; roots int64 [B]; int32 [B]: budgets, depths (deepest
    level allowed), starts (position of the root); max_nodes: the result's M, to which trees are cut. Raises
    NotImplementedError for CPU tensors, TypeError for a dtype, ValueError for a shape, KernelError for a size beyond
    csrc/params.h.
    """
    seqs, length, width = _check("tree_build", "lp", lp, torch.float32, None, None, None)
    _check("tree_build", "ids", ids, torch.int64, seqs, length, width)
    _check("tree_build", "roots", roots, torch.int64, seqs)
    for name, x in (("budgets", budgets), ("depths", depths), ("starts", starts)):
        _check("tree_build", name, x, torch.int32, seqs)
    words = (max_nodes + WORD - 1) // WORD
    made = Trees(
        ids.new_empty(seqs, max_nodes),
        starts.new_empty(seqs, max_nodes),
        starts.new_empty(seqs, max_nodes),
        ids.new_empty(seqs, max_nodes, words),
        starts.new_empty(seqs),
    )
    library().call(
        "tree_build",
        torch.cuda.current_stream(lp.device).cuda_stream,
        lp=lp,
        ids=ids,
        roots=roots,
        budgets=budgets,
        depths=depths,
        starts=starts,
        **made._asdict(),
        seqs=seqs,
        depth=length,
        k=width,
        max_nodes=max_nodes,
        words=words,
    )
    return made


def tree_accept(tokens: torch.Tensor, parents: torch.Tensor, counts: torch.Tensor, chosen: torch.Tensor) -> Walks:
    """The walks of kdtp.spec.accept.walk; a malformed tree is not walked, and harms nobody.

    tokens int64, parents int32 [B, M], counts int32 [B]: as in Trees; chosen int64 [B, M]: the target's choice at each
    node. Raises as tree_build.
    """
    seqs, max_nodes = _check("tree_accept", "tokens", tokens, torch.int64, None, None)
    _check("tree_accept", "parents", parents, torch.int32, seqs, max_nodes)
    _check("tree_accept", "counts", counts, torch.int32, seqs)
    _check("tree_accept", "chosen", chosen, torch.int64, seqs, max_nodes)
    made = Walks(torch.empty_like(parents), torch.empty_like(counts), tokens.new_empty(seqs))
    library().call(
        "tree_accept",
        torch.cuda.current_stream(tokens.device).cuda_stream,
        tokens=tokens,
        parents=parents,
        counts=counts,
        chosen=chosen,
        **made._asdict(),
        seqs=seqs,
        max_nodes=max_nodes,
    )
    return made


def _check(op: str, name: str, x: torch.Tensor, dtype: torch.dtype, *dims: int | None) -> torch.Size:
    """The shape of `x`, which must be a contiguous CUDA tensor of this dtype and of shape `dims` (None: any size)."""
    if not x.is_cuda:
        raise NotImplementedError(f"{op}: {name} is on {x.device}: this op has only a CUDA form")
    if x.dtype != dtype:
        raise TypeError(f"{op}: {name} is {x.dtype}: must be {dtype}")
    if len(x.shape) != len(dims) or any(d not in (None, size) for d, size in zip(dims, x.shape, strict=True)):
        legal = ", ".join("*" if d is None else str(d) for d in dims)
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}: must be [{legal}]")
    if not x.is_contiguous():
        raise ValueError(f"{op}: {name} has strides {list(x.stride())}: must be contiguous")
    return x.shape
