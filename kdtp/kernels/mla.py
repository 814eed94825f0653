"""Multi-head latent attention in absorbed form over a paged cache, for trees, chains and single tokens alike.

Every row sees its keys in position order: the committed prefix, then its ancestors in the tree, then itself. Positions
are cut into blocks of 64 by absolute position. The products of a block have one shape, whatever the batch; the blocks'
sums are added in order, and a block that a row does not see adds exactly 0. So a row's result is a function of its
query and its visible keys, bit for bit: a tree node gives what plain decoding of the same text gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kdtp.kernels import cuda
from kdtp.kernels.check import FLOATS, check, check_rows
from kdtp.kernels.linear import COLUMNS, whole_columns

BLOCK = 64
Piece = tuple[torch.Tensor, torch.Tensor]  # _rows of some query rows of one sequence

_MOST_BLOCKS = 128  # gathered at once, unless a single row sees more: bounds the memory of one call


@dataclass(frozen=True)
class Keys:
    """Where some consecutive query rows find their keys.

    count: n query rows, each with the same number of blocks. rows int64 [n * blocks * 64]: the cache row of the key at
    each position, the query's own row where there is none, so that no row outside its text is ever read;
    bias float32 [n * blocks, 1, 64]: -inf where there is none, else 0.
    """

    count: int
    rows: torch.Tensor
    bias: torch.Tensor


def plan_keys(lines: Sequence[torch.Tensor], parents: Sequence[Sequence[int]]) -> list[Keys]:
    """The keys of a ragged batch, made once for all layers.

    Per sequence: lines int64 [start + M], the cache row of its committed rows and then of its M query rows, and
    parents [M] as in types.Tree. The query rows of all sequences follow each other, and so do the groups.
    """
    pieces = []
    for line, parent in zip(lines, parents, strict=True):
        rows, lengths = _rows(line, parent)
        most = max(1, _MOST_BLOCKS * BLOCK // rows.shape[1])
        pieces += list(zip(torch.split(rows, most), torch.split(lengths, most), strict=True))
    return [_group(group) for group in _gathered(pieces)]


def mla_tree(
    q: torch.Tensor, kv: torch.Tensor, keys: Sequence[Keys] | cuda.Tables, scale: float, kv_lora_rank: int
) -> torch.Tensor:
    """softmax(scale * q @ k) @ latent for M query rows, each over its own keys, in float32.

    q [M', h, D], kv [N, D] (latent, then rope part), float32 or bfloat16 alike; keys from plan_keys, for M <= M' rows
    (those behind the M-th are padding, and come out as 0) -> [M', h, kv_lora_rank] of q's dtype.
    Raises as kernels.check. Source: DeepSeek-V2, section 2.1 (absorbed); ddtree.md section 4 for what a row sees.
    """
    if isinstance(keys, cuda.Tables):
        return cuda.mla_tree(q, kv, keys, scale, kv_lora_rank)
    check("mla_tree", "q", q, FLOATS, None, None, kv.shape[1])
    check("mla_tree", "kv", kv, (q.dtype,), None, None)
    check_rows("mla_tree", sum(group.count for group in keys), q.shape[0])
    out = torch.zeros(*q.shape[:2], kv_lora_rank)
    first = 0
    for group in keys:
        last = first + group.count
        out[first:last] = _attend(q[first:last].float(), kv, group, scale, kv_lora_rank)
        first = last
    return out.to(q.dtype)


def _attend(q: torch.Tensor, kv: torch.Tensor, keys: Keys, scale: float, kv_lora_rank: int) -> torch.Tensor:
    products = keys.bias.shape[0]
    k = whole_columns(kv.index_select(0, keys.rows).float()).view(products, BLOCK, -1)
    q = whole_columns(q)
    n, heads, width = q.shape
    blocks = products // n
    per_block = q.unsqueeze(1).expand(n, blocks, heads, width).reshape(products, heads, width)
    scores = torch.baddbmm(keys.bias, per_block, k.transpose(1, 2), alpha=scale)
    # Softmax goes row by row in the same order whatever the number of rows; missing keys at the end add exactly 0.
    weights = scores.view(n, blocks, heads, BLOCK).transpose(1, 2).reshape(n, heads, -1).softmax(-1)
    weights = weights.view(n, heads, blocks, BLOCK).transpose(1, 2).reshape(products, heads, BLOCK)
    # Whole columns of the keys, which are the latent's and maybe some more, that nobody reads.
    latent = k[..., : kv_lora_rank + -kv_lora_rank % COLUMNS]
    first, *others = torch.bmm(weights, latent).view(n, blocks, heads, -1).unbind(1)
    for part in others:
        first = first + part
    return first[..., :kv_lora_rank]


def _rows(line: torch.Tensor, parents: Sequence[int]) -> Piece:
    """Cache rows by position [M, whole blocks], and how many of them each row sees [M]."""
    count = len(parents)
    start = line.shape[0] - count
    ancestors, depths = _ancestors(parents)
    prefix = line[:start].expand(count, start)
    tail = line[start:]
    spare = -(start + ancestors.shape[1]) % BLOCK
    return torch.cat([prefix, tail[ancestors], tail.unsqueeze(1).expand(count, spare)], 1), start + 1 + depths


def _ancestors(parents: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Node on each row's path at each depth, the row itself below its own: [M, deepest + 1]; and depths [M]."""
    nodes = torch.arange(len(parents))
    if all(parent == i - 1 for i, parent in enumerate(parents)):  # a chain, and maybe a long one
        return torch.minimum(nodes, nodes.unsqueeze(1)), nodes
    paths: list[list[int]] = []
    for i, parent in enumerate(parents):
        paths.append([*paths[parent], i] if i else [0])
    deepest = max(map(len, paths))
    table = torch.tensor([path + path[-1:] * (deepest - len(path)) for path in paths])
    return table, torch.tensor([len(path) - 1 for path in paths])


def _gathered(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Neighbours joined while they stay within the memory of one call."""
    groups: list[list[Piece]] = []
    count = width = 0
    for piece in pieces:
        count, width = count + piece[0].shape[0], max(width, piece[0].shape[1])
        if groups and count * width <= _MOST_BLOCKS * BLOCK:
            groups[-1].append(piece)
        else:
            groups.append([piece])
            count, width = piece[0].shape
    return groups


def _group(pieces: Sequence[Piece]) -> Keys:
    width = max(rows.shape[1] for rows, _ in pieces)
    count = sum(rows.shape[0] for rows, _ in pieces)
    # A BLAS cuts up single products when there are fewer of them than threads, and then sums in another order.
    least = max(2, torch.get_num_threads())
    width = max(width, -(-least // count) * BLOCK)
    rows = torch.cat([_widened(rows, width) for rows, _ in pieces])
    seen = torch.cat([seen for _, seen in pieces])
    bias = torch.zeros(count, width).masked_fill_(torch.arange(width) >= seen.unsqueeze(1), -torch.inf)
    return Keys(count, rows.flatten(), bias.view(-1, 1, BLOCK))


def _widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    # The last column is the row's own in any case.
    spare = width - rows.shape[1]
    return torch.cat([rows, rows[:, -1:].expand(-1, spare)], 1) if spare else rows
