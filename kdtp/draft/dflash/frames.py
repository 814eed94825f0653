"""What was drafted, on its way from the device that drafted it to the coordinator: in one copy, and as one frame.

Candidates: float32 lp, then int32 ids [B, L, K]. Trees: int32 tokens, int32 parents, float32 scores [B, M] and int32
counts [B], as in kernels.Trees, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kdtp import kernels
from kdtp.draft.dflash.network import Drafted
from kdtp.drafting import Root
from kdtp.proposals import Conditionals, Grown, Marginals
from kdtp.types import Tree

Frame = tuple[tuple[int, ...], Callable[[], bytes]]  # shape, as in drafting.Drafts, and bytes when they have come


def pack(drafted: Drafted, roots: Sequence[Root], shape: str) -> Frame:
    """The candidates, or if a shape is named the tree of each root."""
    if shape:
        return _pack_trees(trees(drafted, roots, shape))
    lp, ids = drafted
    return tuple(lp.shape), _copied(lp, ids)


def unpack(shape: Sequence[int], frame: bytes) -> Sequence[Marginals | Conditionals | Grown]:
    """What was packed. ValueError if it is not of this shape, or no trees."""
    return _unpack_trees(shape, frame) if len(shape) == 2 else _unpack_candidates(shape, frame).proposals()


def trees(drafted: Drafted, roots: Sequence[Root], shape: str) -> kernels.Trees:
    """Trees of that shape on the device of the candidates, one kernel for all; nothing waits for the host."""
    budgets = [root.budget for root in roots]
    asked = torch.tensor([[root.token for root in roots], budgets, [root.depth for root in roots]])
    if drafted.ids.is_cuda:
        asked = asked.pin_memory().to(drafted.ids.device, non_blocking=True)
    limits = asked[1:].int()
    return kernels.tree_build(drafted.lp, drafted.ids, asked[0], limits[0], limits[1], 1 + max(budgets), shape)


def _pack_trees(made: kernels.Trees) -> Frame:
    return tuple(made.tokens.shape), _copied(made.tokens, made.parents, made.scores, made.counts)


def _copied(*tensors: torch.Tensor) -> Callable[[], bytes]:
    """All of them in one copy from the device, which is under way; what is not float32 as int32."""
    words = [x.flatten().view(torch.int32) if x.dtype == torch.float32 else x.flatten().int() for x in tensors]
    found = torch.cat(words)
    host = torch.empty_like(found, device="cpu", pin_memory=found.is_cuda).copy_(found, non_blocking=True)
    came = torch.cuda.Event() if found.is_cuda else None  # type: ignore[no-untyped-call]
    if came is not None:
        came.record()

    def fetch() -> bytes:
        if came is not None:
            came.synchronize()
        data: bytes = host.numpy().tobytes()
        return data

    return fetch


def _unpack_candidates(shape: Sequence[int], frame: bytes) -> Drafted:
    batch, depth, k = shape[:3]
    count = batch * depth * k
    size = count * (k if len(shape) == 4 else 1)
    if not count or len(frame) != 4 * (size + count):
        raise ValueError(f"drafts of shape {tuple(shape)} in {len(frame)} bytes")
    both = torch.frombuffer(bytearray(frame), dtype=torch.int32)
    return Drafted(both[:size].view(torch.float32).view(*shape), both[size:].view(batch, depth, k).long())


def _unpack_trees(shape: Sequence[int], frame: bytes) -> list[Grown]:
    batch, most = shape
    if not batch * most or len(frame) != 4 * batch * (3 * most + 1):
        raise ValueError(f"trees of shape {tuple(shape)} in {len(frame)} bytes")
    words = memoryview(frame)
    size = 4 * batch * most
    tokens, parents = (words[i * size : (i + 1) * size].cast("i") for i in range(2))
    scores, counts = words[2 * size : 3 * size].cast("f"), words[3 * size :].cast("i")
    found = []
    for first, count in zip(range(0, batch * most, most), counts, strict=True):
        if not 1 <= count <= most:
            raise ValueError(f"a tree of {count} nodes: must be 1..{most}")
        own = slice(first, first + count)
        found.append(Grown(Tree(tuple(tokens[own]), tuple(parents[own])), scores[own].tolist()))
    return found
