"""Routed experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kdtp.kernels import cuda
from kdtp.kernels.act import silu_mul
from kdtp.kernels.check import FLOAT32, FLOATS, INDEX, check, check_rows
from kdtp.kernels.linear import narrowed, widened
from kdtp.types import TILE


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    add: torch.Tensor | None = None,
    ready: torch.cuda.Event | None = None,
) -> torch.Tensor:
    """The weighted sum of each row's experts, added in the order of its ids, and `add` [M', H] on top.

    x [M', H], ids int64 [M, k], weights float32 [M, k] with M <= M' (rows of x behind the M-th are padding, and get
    `add` alone, or 0), w_gate_up [E, H, 2 * I] (gate, then up), w_down [E, I, H]; x, `add` and the experts float32 or
    bfloat16 alike, the sum in float32 -> [M', H] of x's dtype. On a GPU `add` may be made on another stream: it is
    there after `ready`. Raises as kernels.check.
    """
    if x.is_cuda:
        return cuda.moe(x, ids, weights, w_gate_up, w_down, add, ready)
    check("moe", "x", x, FLOATS, None, w_gate_up.shape[1])
    check("moe", "ids", ids, INDEX, None, None)
    check_rows("moe", ids.shape[0], x.shape[0])
    check("moe", "weights", weights, FLOAT32, *ids.shape)
    check("moe", "w_gate_up", w_gate_up, (x.dtype,), None, None, None)
    check("moe", "w_down", w_down, (x.dtype,), w_gate_up.shape[0], w_gate_up.shape[2] // 2, x.shape[1])
    rows, places, experts = _assign(ids)
    out = _each(silu_mul(_each(x.index_select(0, rows), w_gate_up, experts)), w_down, experts)
    terms = out.index_select(0, places).float().view(*ids.shape, -1) * weights.unsqueeze(2)
    total = x.new_zeros(x.shape, dtype=torch.float32)
    first = total[: ids.shape[0]]
    for term in terms.unbind(1):
        first += term
    if add is not None:
        check("moe", "add", add, (x.dtype,), *x.shape)
        total += add
    return total.to(x.dtype)


def _assign(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Sort (row, choice) pairs into tiles of one expert each.

    Returns the row of x at each place of the tiles, the place of each pair [M * k], and the expert of each tile. A
    tile's unused places repeat one of its rows; nobody reads what they give.
    """
    pairs_of: dict[int, list[int]] = {}
    for pair, expert in enumerate(ids.flatten().tolist()):
        pairs_of.setdefault(expert, []).append(pair)
    rows: list[int] = []
    places = [0] * ids.numel()
    experts: list[int] = []
    for expert, pairs in sorted(pairs_of.items()):
        for place, pair in enumerate(pairs, len(rows)):
            places[pair] = place
        pairs += pairs[:1] * (-len(pairs) % TILE)
        rows += [pair // ids.shape[1] for pair in pairs]
        experts += [expert] * (len(pairs) // TILE)
    return torch.tensor(rows), torch.tensor(places), experts


def _each(x: torch.Tensor, w: torch.Tensor, experts: Sequence[int]) -> torch.Tensor:
    """Tile by tile, x @ w[its expert]: [tiles * TILE, in] -> [tiles * TILE, out]."""
    wide = widened(w)
    out = torch.empty(x.shape[0], wide.shape[2], dtype=x.dtype)
    tiles, parts = x.view(-1, TILE, x.shape[1]), out.view(-1, TILE, wide.shape[2])
    for tile, part, expert in zip(tiles.unbind(), parts.unbind(), experts, strict=True):
        torch.mm(tile, wide[expert], out=part)
    return narrowed(out, w)
