"""What each row of a tree may see: positions and the ancestor mask, from parent indices alone.

Siblings share a position, never a row: node i is stored at row start + i and has position start + depth(i).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtp.types import ROOT, depths


def positions(start: int, parents: Sequence[int]) -> list[int]:
    """RoPE position of each node, [M]; the root's is `start`, the number of committed tokens."""
    return [start + depth for depth in depths(parents)]


def ancestor_bits(parents: Sequence[int]) -> list[int]:
    """For each node an integer whose bit j says that it sees node j: itself, its ancestors, the root."""
    bits: list[int] = []
    for i, parent in enumerate(parents):
        bits.append((0 if parent == ROOT else bits[parent]) | 1 << i)
    return bits


def ancestors(parents: Sequence[int]) -> torch.Tensor:
    """The same as bool [M, M]: row i sees column j."""
    size = len(parents)
    width = (size + 7) // 8
    packed = bytearray(b"".join(bits.to_bytes(width, "little") for bits in ancestor_bits(parents)))
    octets = torch.frombuffer(packed, dtype=torch.uint8).view(size, width, 1)
    return (octets >> torch.arange(8, dtype=torch.uint8) & 1).view(size, 8 * width)[:, :size].bool()


def dense(start: int, parents: Sequence[int], kv_len: int) -> torch.Tensor:
    """The full visibility mask, bool [M, kv_len]: the committed prefix [0, start), then the ancestors.

    For the reference and for tests: at long context it is far larger than the forward's other inputs.
    """
    size = len(parents)
    assert kv_len >= start + size, f"{kv_len} rows for {start} committed and {size} nodes"
    mask = torch.zeros(size, kv_len, dtype=torch.bool)
    mask[:, :start] = True
    mask[:, start : start + size] = ancestors(parents)
    return mask
