"""One TP=8 rank of Kimi K2.6: its shapes, random tensors of them, a tree over a paged cache, routing to order."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kdtp.kernels import Routing
from kdtp.kernels.cuda import Tables

HIDDEN, LAYERS, DENSE_LAYERS = 7168, 61, 1
HEADS, Q_LORA, LORA, ROPE, NOPE, V = 8, 1536, 512, 64, 128, 128
KV_ROW = LORA + ROPE
DENSE, INTER, SHARED = 2304, 256, 256
EXPERTS, TOPK = 384, 8
VOCAB = 20480
EPS = 1e-5
SCALE = (NOPE + ROPE) ** -0.5
ROUTING = Routing(TOPK, "sigmoid", 1, 1, True, 2.827)

BF16 = torch.bfloat16
PAGE = 64
COLD = 256 << 20  # bytes that push each other out of the L2 cache
_DEVIATION = 21.5**0.5  # root mean square of a nibble - 8
Experts = tuple[torch.Tensor, torch.Tensor]  # packed int32 [E, out, in / 8], scales bfloat16 [E, out, in / 32]


@dataclass(frozen=True)
class Tensors:
    """Random tensors on a GPU; on the CPU, for a dry run, memory that nobody touches."""

    device: torch.device

    @property
    def dry(self) -> bool:
        """Whether floats are left as they are."""
        return self.device.type == "cpu"

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = BF16) -> torch.Tensor:
        """Deviation `scale`."""
        x = torch.empty(shape, dtype=dtype, device=self.device)
        return x if self.dry else x.normal_(0.0, scale)

    def norm(self, width: int) -> torch.Tensor:
        """Weights of a norm, near 1."""
        x = torch.empty(width, device=self.device)
        return x if self.dry else x.normal_(1.0, 0.1)

    def matrix(self, inputs: int, outputs: int) -> torch.Tensor:
        """[in, out], K-major, which keeps the deviation of what it is applied to."""
        return self.normal(outputs, inputs, scale=inputs**-0.5).T

    def matrices(self, heads: int, inputs: int, outputs: int) -> torch.Tensor:
        """[heads, in, out], likewise."""
        return self.normal(heads, outputs, inputs, scale=inputs**-0.5).transpose(1, 2)

    def experts(self, outputs: int, inputs: int) -> Experts:
        """INT4 experts: any bits are as good as repacked ones."""
        packed = torch.empty(EXPERTS, outputs, inputs // 8, dtype=torch.int32, device=self.device)
        scales = torch.empty(EXPERTS, outputs, inputs // 32, dtype=BF16, device=self.device)
        if not self.dry:
            packed.random_(-(2**31), 2**31 - 1)
            scales.uniform_(0.5, 1.5).mul_(inputs**-0.5 / _DEVIATION)
        return packed, scales

    def ints(self, values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """`values`, dry or not."""
        return torch.as_tensor(values).to(dtype).to(self.device)

    def copies(self, nbytes: int) -> int:
        """How many sets of `nbytes` a measurement goes through, so that the cache helps none."""
        return 1 if self.dry else min(256, max(2, -(-COLD // nbytes)))


@dataclass(frozen=True)
class Batch:
    """One tree of M nodes over a context; tensors named as in kdtp.model.batch. cache_rows: of each layer's cache."""

    tokens: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor
    keys: Tables
    cache_rows: int


def binary(nodes: int) -> list[int]:
    """Parents of a tree in which every node has two children."""
    return [(node - 1) // 2 if node else -1 for node in range(nodes)]


def tree(tensors: Tensors, nodes: int, context: int) -> Batch:
    """A binary tree of `nodes` over `context` committed rows, in pages in random order."""
    random = torch.Generator().manual_seed(nodes + context)
    paths: list[list[int]] = []
    for node, parent in enumerate(binary(nodes)):
        paths.append([*(paths[parent] if node else []), node])
    depth = [len(path) - 1 for path in paths]
    pages = torch.randperm(-(-(context + nodes) // PAGE), generator=random)
    where = torch.arange(context, context + nodes)
    keys = Tables(
        row_seq=tensors.ints([0] * nodes),
        row_depth=tensors.ints(depth),
        path=tensors.ints([path + path[-1:] * (depth[-1] + 1 - len(path)) for path in paths]),
        starts=tensors.ints([context]),
        first_row=tensors.ints([0]),
        pages=tensors.ints(pages[None]),
        max_start=context,
    )
    angles = torch.rand(nodes, ROPE // 2, generator=random) * 6.28
    return Batch(
        tokens=tensors.ints(torch.randint(VOCAB, (nodes,), generator=random), torch.int64),
        cos=angles.cos().to(tensors.device),
        sin=angles.sin().to(tensors.device),
        rows=tensors.ints(pages[where // PAGE] * PAGE + where % PAGE, torch.int64),
        keys=keys,
        cache_rows=len(pages) * PAGE,
    )


def route(tensors: Tensors, rows: int, overlap: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 and weights float32 [rows, 8], uniform but for a share `overlap` of experts that all rows have."""
    random = torch.Generator().manual_seed(seed)
    common = torch.randperm(EXPERTS, generator=random)[: round(overlap * TOPK)]
    order = torch.rand(rows, EXPERTS, generator=random)
    order[:, common] = 2.0
    weights = torch.rand(rows, TOPK, generator=random) + 0.1
    weights *= ROUTING.scale / weights.sum(1, keepdim=True)
    return tensors.ints(order.topk(TOPK).indices.sort(1).values), weights.to(tensors.device)


def hit(ids: torch.Tensor) -> int:
    """How many experts a step reads."""
    return int(ids.unique().numel())


def kept(tensors: tuple[torch.Tensor, ...]) -> int:
    """Bytes of some tensors."""
    return sum(x.nbytes for x in tensors)
