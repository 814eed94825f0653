"""What was drafted, on its way from the device that drafted it to the coordinator: in one copy, and as one frame.

Candidates: float32 lp, then int32 ids [B, L, K]. Trees: int32 [B, 3 M + 1], of each its tokens, parents and scores [M],
which are float32, and its count, as in kernels.Trees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kdtp import kernels
from kdtp.draft.dflash.network import HEAD, DFlash, Drafted
from kdtp.proposals import Conditionals, Grown, Marginals
from kdtp.types import Tree

Found = Drafted | torch.Tensor  # candidates, or trees as above
Frame = tuple[tuple[int, ...], Callable[[], bytes]]  # shape, as in drafting.Drafts, and bytes when they have come


@torch.inference_mode()
def draft(network: DFlash, asked: torch.Tensor, k: int, shape: str, nodes: int) -> Found:
    """Candidates of what was gathered, on the network's device; trees of at most so many nodes if a shape is named.
    Nothing in it waits for the host."""
    drafted = network.forward(asked, k)
    if not shape:
        return drafted
    roots, limits = asked[:, 0].contiguous(), asked[:, 3:HEAD].int().t().contiguous()
    made = kernels.tree_build(drafted.lp, drafted.ids, roots, limits[0], limits[1], nodes, shape)
    return torch.cat([made.tokens.int(), made.parents, made.scores.view(torch.int32), made.counts[:, None]], 1)


def pack(found: Found) -> Frame:
    """What `draft` has found."""
    if isinstance(found, torch.Tensor):
        return (len(found), found.shape[1] // 3), _copied(found)
    lp, ids = found
    return tuple(lp.shape), _copied(torch.cat([lp.flatten().view(torch.int32), ids.flatten().int()]))


def unpack(shape: Sequence[int], frame: bytes) -> Sequence[Marginals | Conditionals | Grown]:
    """What was packed. ValueError if it is not of this shape, or no trees."""
    return _unpack_trees(shape, frame) if len(shape) == 2 else _unpack_candidates(shape, frame).proposals()


def _copied(words: torch.Tensor) -> Callable[[], bytes]:
    """The copy from the device is under way."""
    host = torch.empty_like(words, device="cpu", pin_memory=words.is_cuda).copy_(words, non_blocking=True)
    came = torch.cuda.Event() if words.is_cuda else None  # type: ignore[no-untyped-call]
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
    wide = 3 * most + 1
    if not batch * most or len(frame) != 4 * batch * wide:
        raise ValueError(f"trees of shape {tuple(shape)} in {len(frame)} bytes")
    words = memoryview(frame)
    ints, floats, found = words.cast("i"), words.cast("f"), []
    for first in range(0, batch * wide, wide):
        count = ints[first + wide - 1]
        if not 1 <= count <= most:
            raise ValueError(f"a tree of {count} nodes: must be 1..{most}")
        tokens, parents, scores = (slice(first + i * most, first + i * most + count) for i in range(3))
        found.append(Grown(Tree(tuple(ints[tokens]), tuple(ints[parents])), floats[scores].tolist()))
    return found
