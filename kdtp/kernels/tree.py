"""Draft trees beside the drafter's candidates: built from them, and walked by the target's choices.

The trees are those of kdtp.spec.tree, which builds them one by one and of any proposal. tree_accept has only a CUDA
form: for CPU tensors kdtp.spec.accept is the same function, tree by tree.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional

from kdtp.kernels.abi import Fields, library
from kdtp.kernels.check import check_at
from kdtp.types import SHAPES

WORD = 64  # nodes in a word of ancestor bits


class Trees(NamedTuple):
    """Trees of B sequences; entries behind a sequence's `counts` hold nothing.

    tokens int64, parents int32 (-1: the root), scores float32 (log-probability of the path) [B, M]; counts int32 [B]:
    nodes, root included. If the roots' positions are known: positions int32 [B, M], and ancestors int64 [B, M, W]: bit
    j of a node's words says that node j is an ancestor of it or itself.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    counts: torch.Tensor
    positions: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None


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
    max_nodes: int,
    shape: str = "tree",
    starts: torch.Tensor | None = None,
) -> Trees:
    """The trees of kdtp.spec.tree.grow, bit for bit, of all sequences at once and without a round trip to the host.

    lp float32 [B, L, K], ids int64 [B, L, K] as in Marginals, or lp [B, L, K, K] as in Conditionals; roots int64 [B];
    int32 [B]: budgets, depths (deepest level allowed), starts (position of the root: then the result has positions);
    max_nodes: the result's M, to which trees are cut; shape: one of SHAPES. Raises TypeError for a dtype, ValueError
    for another form, KernelError for a size beyond csrc/params.h.
    """
    check = partial(check_at, "tree_build", ids.device)
    seqs, length, width = check("ids", ids, torch.int64, None, None, None)
    check("lp", lp, torch.float32, seqs, length, width, *([width] if lp.dim() == 4 else []))
    check("roots", roots, torch.int64, seqs)
    for name, x in (("budgets", budgets), ("depths", depths), ("starts", budgets if starts is None else starts)):
        check(name, x, torch.int32, seqs)
    if shape not in SHAPES:
        raise ValueError(f"tree_build: shape {shape!r}: must be one of {', '.join(SHAPES)}")
    if ids.is_cuda:
        return _in_cuda(lp, ids, roots, budgets, depths, max_nodes, shape, starts)
    if min(width, max_nodes) < 1:
        raise ValueError(f"tree_build: k {width}, max_nodes {max_nodes}: must be at least 1")
    levels = _in_torch(lp, ids, depths, max_nodes - 1, shape)
    made = _joined(levels, ids, roots, budgets, max_nodes - 1)
    return made if starts is None else _placed(made, starts)


def tree_accept(tokens: torch.Tensor, parents: torch.Tensor, counts: torch.Tensor, chosen: torch.Tensor) -> Walks:
    """The walks of kdtp.spec.accept.walk; a malformed tree is not walked, and harms nobody.

    tokens int64, parents int32 [B, M], counts int32 [B]: as in Trees; chosen int64 [B, M]: the target's choice at each
    node. Raises as tree_build.
    """
    if not tokens.is_cuda:
        raise NotImplementedError(f"tree_accept: tokens is on {tokens.device}: this op has only a CUDA form")
    check = partial(check_at, "tree_accept", tokens.device)
    seqs, max_nodes = check("tokens", tokens, torch.int64, None, None)
    check("parents", parents, torch.int32, seqs, max_nodes)
    check("counts", counts, torch.int32, seqs)
    check("chosen", chosen, torch.int64, seqs, max_nodes)
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


def _in_cuda(
    lp: torch.Tensor,
    ids: torch.Tensor,
    roots: torch.Tensor,
    budgets: torch.Tensor,
    depths: torch.Tensor,
    max_nodes: int,
    shape: str,
    starts: torch.Tensor | None,
) -> Trees:
    (seqs, length, width), words = ids.shape, (max_nodes + WORD - 1) // WORD
    made = Trees(
        ids.new_empty(seqs, max_nodes),
        budgets.new_empty(seqs, max_nodes),
        lp.new_empty(seqs, max_nodes),
        budgets.new_empty(seqs),
        None if starts is None else starts.new_empty(seqs, max_nodes),
        None if starts is None else ids.new_empty(seqs, max_nodes, words),
    )
    inputs: Fields = {"lp": lp, "ids": ids, "roots": roots, "budgets": budgets, "depths": depths, "starts": starts}
    sizes: Fields = {"seqs": seqs, "depth": length, "before": lp.shape[2] if lp.dim() == 4 else 1, "k": width}
    sizes |= {"max_nodes": max_nodes, "shape": SHAPES.index(shape)}
    stream = torch.cuda.current_stream(ids.device).cuda_stream
    library().call("tree_build", stream, **inputs, **made._asdict(), **sizes)
    return made


class _Level(NamedTuple):
    """Nodes of one depth, [B, m] each, in the tree's order. keys: what they are sorted by; taken: which candidate each
    is; parents: as index among the nodes of all levels, the root first."""

    keys: torch.Tensor
    scores: torch.Tensor
    taken: torch.Tensor
    parents: torch.Tensor


def _in_torch(lp: torch.Tensor, ids: torch.Tensor, depths: torch.Tensor, most: int, shape: str) -> list[_Level]:
    """The best nodes of a depth are children of the best of the depth above; the best of all of them are the tree.

    A level's nodes are in order and a node's children in theirs, and all sorting is stable, which is the order's rule
    for equal scores.
    """
    rows, names = _ranked(lp, ids, depths)
    if shape == "chain":
        rows, names = rows[..., :1], names[..., :1]
    (seqs, length, above, width), batch = rows.shape, torch.arange(len(ids))[:, None]
    none = ids.new_zeros(seqs, 1)
    levels, first = [_Level(rows.new_full((seqs, 1), 2.0), rows.new_zeros(seqs, 1), none, none)], 0
    for d in range(min(length, most)):
        last = levels[-1]
        row = last.taken if above > 1 and d else torch.zeros_like(last.taken)
        scores = (last.scores[:, :, None] + rows[batch, d, row]).flatten(1)
        keys, nodes = _keys(shape, scores, last).sort(dim=1, descending=True, stable=True)
        nodes = nodes[:, : most - d]
        parents = nodes // width
        taken = names[batch, d, row.gather(1, parents), nodes % width]
        levels.append(_Level(keys[:, : most - d], scores.gather(1, nodes), taken, first + parents))
        first += last.keys.shape[1]
    return levels


def _ranked(lp: torch.Tensor, ids: torch.Tensor, depths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What may follow each candidate of the depth above, best first: lp [B, L, K or 1, K], -inf in rows that cannot be
    used, and which candidate each is."""
    rows = (lp if lp.dim() == 4 else lp[:, :, None]).clamp(max=0.0)
    bad = (lp.isnan() | (lp == math.inf)).view(rows.shape).any(3)
    if lp.dim() == 3:
        bad |= (rows[..., 1:] > rows[..., :-1]).any(3)
    deep = torch.arange(rows.shape[1]) >= depths[:, None]
    rows = rows.masked_fill((bad | deep[:, :, None])[..., None], -math.inf)
    if lp.dim() == 3:
        return rows, torch.arange(rows.shape[3]).expand(rows.shape)
    by_id = ids.argsort(2)[:, :, None].expand(rows.shape)
    rows, order = rows.gather(3, by_id).sort(dim=3, descending=True, stable=True)
    return rows, by_id.gather(3, order)


def _keys(shape: str, scores: torch.Tensor, above: _Level) -> torch.Tensor:
    """Scores; above all scores for the most likely path, if that is to come first: it has the first node of a level."""
    if shape != "seeded":
        return scores
    goes_on = (above.keys[:, 0] > 0.0) & (scores[:, 0] > -math.inf)
    return torch.cat([torch.where(goes_on, 1.0, scores[:, 0])[:, None], scores[:, 1:]], 1)


def _joined(levels: list[_Level], ids: torch.Tensor, roots: torch.Tensor, budgets: torch.Tensor, most: int) -> Trees:
    """The best nodes of all levels."""
    every = _Level(*(torch.cat(each, 1) for each in zip(*levels, strict=True)))
    depths = torch.cat([torch.full_like(level.taken, d) for d, level in enumerate(levels)], 1)
    keys, nodes = every.keys.sort(dim=1, descending=True, stable=True)
    place = torch.empty_like(nodes).scatter_(1, nodes, torch.arange(nodes.shape[1]).expand_as(nodes))
    nodes = nodes[:, : 1 + most]
    counts = torch.minimum(1 + budgets.clamp(min=0), (keys[:, : 1 + most] > -math.inf).sum(1)).int()
    flat = depths.gather(1, nodes) * ids.shape[2] + every.taken.gather(1, nodes)
    tokens = torch.cat([roots[:, None].expand(-1, ids.shape[2]), ids.flatten(1)], 1).gather(1, flat)
    parents = place.gather(1, every.parents.gather(1, nodes)).int()
    parents[:, :1] = -1
    room = 1 + most - nodes.shape[1]
    tokens, parents, scores = (functional.pad(x, (0, room)) for x in (tokens, parents, every.scores.gather(1, nodes)))
    return Trees(tokens, parents, scores, counts)


def _placed(made: Trees, starts: torch.Tensor) -> Trees:
    """With positions and ancestor bits."""
    seqs, nodes = made.tokens.shape
    words = (nodes + WORD - 1) // WORD
    seen = torch.eye(nodes, words * WORD, dtype=torch.bool).repeat(seqs, 1, 1)
    for node in range(1, nodes):
        seen[:, node] |= seen[torch.arange(seqs), made.parents[:, node].long()]
    bits = seen.view(seqs, nodes, words, WORD).long() << torch.arange(WORD)
    return made._replace(positions=(starts[:, None] + seen.sum(2) - 1).int(), ancestors=bits.sum(3))
