"""What bench_kernels.py measures: each kernel at one TP=8 rank's shapes of Kimi K2.6, and torch's way where it has one.

Weights and caches come in as many sets as the L2 cache cannot hold; activations are small, and are in it in a real step
too. `moved` counts the bytes that count: weights, cache rows, logits; 0 where there is nothing but activations.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from kdtp.kernels import abi, cuda
from scripts import drafter_cases
from scripts.k26 import (
    BF16,
    DENSE,
    EPS,
    EXPERTS,
    HEADS,
    HIDDEN,
    INTER,
    KV_ROW,
    LAYERS,
    LORA,
    NOPE,
    Q_LORA,
    ROPE,
    ROUTING,
    SCALE,
    SHARED,
    TOPK,
    VOCAB,
    Tensors,
    V,
    binary,
    hit,
    kept,
    route,
    tree,
)

Call = Callable[[], Any]
Rows = Sequence[int]
LINEARS = {
    "q_a + kv_a": (HIDDEN, Q_LORA + KV_ROW),
    "q_b": (Q_LORA, HEADS * (NOPE + ROPE)),
    "w_o": (HEADS * V, HIDDEN),
    "router": (HIDDEN, EXPERTS),
    "shared gate_up": (HIDDEN, 2 * SHARED),
    "shared down": (SHARED, HIDDEN),
    "dense gate_up": (HIDDEN, 2 * DENSE),
    "dense down": (DENSE, HIDDEN),
    "head": (HIDDEN, VOCAB),
}
F32_OUT = ("router", "head")
SPOTS = 64  # places in the cache that moves go through
DRAFT = 7  # depths of the drafter


@dataclass(frozen=True)
class Case:
    """One kernel at one M. calls, torch: by set of weights, in turn; flops and moved: of one call."""

    name: str
    rows: int
    calls: Sequence[Call]
    torch: Sequence[Call] = ()
    moved: int = 0
    flops: int = 0


@dataclass(frozen=True)
class Cases:
    """Cases of each op, for these rows and contexts."""

    tensors: Tensors
    rows: Rows
    contexts: Rows
    ops: dict[str, Callable[[], Iterator[Case]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        ops = (
            *(self.embedding, self.rms_norm, self.linear, self.linear_heads, self.mla_prep, self.mla_tree),
            *(self.router, self.moe, self.moe_repack, self.silu_mul, self.argmax, self.topk),
            *(self.tree_build, self.tree_accept, self.kv_move, self.gqa_prep, self.convolve),
        )
        self.ops.update({op.__name__: op for op in ops})

    def embedding(self) -> Iterator[Case]:
        """Token rows."""
        w = self.tensors.normal(VOCAB, HIDDEN)
        for m in self.rows:
            ids = [torch.randint(VOCAB, (m,), device=self.tensors.device) for _ in range(64)]
            calls = [partial(cuda.embedding, each, w, 0) for each in ids]
            yield Case("embedding", m, calls, [partial(F.embedding, each, w) for each in ids])

    def rms_norm(self) -> Iterator[Case]:
        """With and without an addition in front."""
        for name, width, adds in (("add + rms_norm 7168", HIDDEN, True), ("rms_norm 1536", Q_LORA, False)):
            w = self.tensors.norm(width)
            for m in self.rows:
                x, residual = self.tensors.normal(m, width), self.tensors.normal(m, width)
                theirs = partial(_torch_norm, x, w.to(BF16), residual if adds else None)
                yield Case(name, m, [partial(cuda.rms_norm, x, w, EPS, residual if adds else None)], [theirs])

    def linear(self) -> Iterator[Case]:
        """Every matrix; torch's router and head give bfloat16, ours float32."""
        for name, (inputs, outputs) in LINEARS.items():
            size = 2 * inputs * outputs
            ws = [self.tensors.matrix(inputs, outputs) for _ in range(self.tensors.copies(size))]
            for m in self.rows:
                x = self.tensors.normal(m, inputs)
                calls = [partial(cuda.linear, x, w, name in F32_OUT) for w in ws]
                theirs = [partial(torch.mm, x, w) for w in ws]
                yield Case(f"linear {name} {inputs}x{outputs}", m, calls, theirs, size, size * m)

    def linear_heads(self) -> Iterator[Case]:
        """Into and out of the latents."""
        for name, inputs, outputs in (("w_kc", NOPE, LORA), ("w_vc", LORA, V)):
            size = 2 * HEADS * inputs * outputs
            ws = [self.tensors.matrices(HEADS, inputs, outputs) for _ in range(self.tensors.copies(size))]
            for m in self.rows:
                x = self.tensors.normal(m, HEADS, inputs)
                calls = [partial(cuda.linear_heads, x, w) for w in ws]
                theirs = [partial(torch.bmm, x.transpose(0, 1), w) for w in ws]
                yield Case(f"linear_heads {name} {HEADS}x{inputs}x{outputs}", m, calls, theirs, size, size * m)

    def mla_prep(self) -> Iterator[Case]:
        """Rope, the latent's norm, new KV rows."""
        w = self.tensors.norm(LORA)
        for m in self.rows:
            batch = tree(self.tensors, m, 1024)
            q, new = self.tensors.normal(m, HEADS, NOPE + ROPE), self.tensors.normal(m, Q_LORA + KV_ROW)[:, Q_LORA:]
            kv = self.tensors.normal(batch.cache_rows, KV_ROW)
            yield Case("mla_prep", m, [partial(cuda.mla_prep, q, new, w, EPS, batch.cos, batch.sin, batch.rows, kv)])

    def mla_tree(self) -> Iterator[Case]:
        """A tree over each context."""
        for context, m in itertools.product(self.contexts, self.rows):
            batch = tree(self.tensors, m, context)
            seen = context + m
            copies = self.tensors.copies(2 * KV_ROW * batch.cache_rows)
            kvs = [self.tensors.normal(batch.cache_rows, KV_ROW) for _ in range(copies)]
            q = self.tensors.normal(m, HEADS, KV_ROW)
            calls = [partial(cuda.mla_tree, q, kv, batch.keys, SCALE, LORA) for kv in kvs]
            flops = 2 * m * HEADS * seen * (KV_ROW + LORA)
            yield Case(f"mla_tree {context // 1024}k", m, calls, moved=2 * KV_ROW * seen, flops=flops)

    def router(self) -> Iterator[Case]:
        """Choice of 8 out of 384."""
        bias = self.tensors.normal(EXPERTS, scale=0.01, dtype=torch.float32)
        for m in self.rows:
            logits = self.tensors.normal(m, EXPERTS, dtype=torch.float32)
            calls = [partial(cuda.router, logits, bias, ROUTING)]
            yield Case("router", m, calls, [partial(_torch_router, logits, bias)])

    def moe(self) -> Iterator[Case]:
        """INT4 experts, uniform routing, another for each call."""
        layers = [
            (*self.tensors.experts(2 * INTER, HIDDEN), *self.tensors.experts(HIDDEN, INTER))
            for _ in range(self.tensors.copies(EXPERTS * INTER * HIDDEN))
        ]
        for m in self.rows:
            x = self.tensors.normal(m, HIDDEN)
            routes = [route(self.tensors, m, 0.0, seed) for seed in range(16)]
            calls = [
                partial(cuda.moe_int4, x, *routing, *layer)
                for routing, layer in zip(routes, itertools.cycle(layers), strict=False)
            ]
            hits = sum(hit(ids) for ids, _ in routes) / len(routes)
            flops = 2 * m * TOPK * 3 * HIDDEN * INTER
            yield Case("moe int4", m, calls, moved=int(kept(layers[0]) * hits / EXPERTS), flops=flops)

    def moe_repack(self) -> Iterator[Case]:
        """Gate and up of a layer, at load: read and written; not a matter of M."""
        packed, scales = self.tensors.experts(2 * INTER, HIDDEN)
        moved = 2 * kept((packed, scales))
        yield Case("moe_repack gate_up", 1, [partial(cuda.repack, packed, scales)], moved=moved)

    def silu_mul(self) -> Iterator[Case]:
        """Of the shared expert and of the dense layer."""
        for width, m in itertools.product((SHARED, DENSE), self.rows):
            x = self.tensors.normal(m, 2 * width)
            yield Case(f"silu_mul {width}", m, [partial(cuda.silu_mul, x)], [partial(_torch_silu, x)])

    def argmax(self) -> Iterator[Case]:
        """Of a vocabulary shard."""
        for m in self.rows:
            x = self.tensors.normal(m, VOCAB, dtype=torch.float32)
            yield Case(f"argmax {VOCAB}", m, [partial(cuda.argmax, x, 0)], [partial(torch.max, x, 1)])

    def topk(self) -> Iterator[Case]:
        """The drafter's candidates, from a shard and from a whole vocabulary."""
        for vocab, m in itertools.product((VOCAB, 8 * VOCAB), self.rows):
            x = self.tensors.normal(m, vocab, dtype=torch.float32)
            yield Case(f"topk 64 of {vocab}", m, [partial(cuda.topk_logsumexp, x, 64)], [partial(_torch_topk, x)])

    def tree_build(self) -> Iterator[Case]:
        """A tree of M nodes; see bench_tree.py for what others do."""
        for m in self.rows:
            if m > 1:
                yield Case("tree_build", m, [partial(_call, "tree_build", _building(self.tensors, m))])

    def tree_accept(self) -> Iterator[Case]:
        """The longest walk through a binary tree of M nodes."""
        for m in self.rows:
            yield Case("tree_accept", m, [partial(_call, "tree_accept", _accepting(self.tensors, m))])

    def kv_move(self) -> Iterator[Case]:
        """M rows in all layers."""
        kv = self.tensors.normal(LAYERS, SPOTS * 256, KV_ROW)
        for m in self.rows:
            calls, theirs = [], []
            offsets = self.tensors.ints([0, m])
            for spot in range(SPOTS):
                target = self.tensors.ints(torch.arange(m) + 256 * spot, torch.int64)
                source = self.tensors.ints(2 * torch.arange(m) + 256 * spot + 1, torch.int64)
                shape = {"layers": LAYERS, "layer_rows": kv.shape[1], "width": KV_ROW, "groups": 1, "dtype": 1}
                moves = {"kv": kv, "source": source, "target": target, "offsets": offsets}
                calls.append(partial(_call, "kv_move", shape | moves))
                theirs.append(partial(_torch_move, kv, source, target))
            yield Case(f"kv_move, {LAYERS} layers", m, calls, theirs)

    def gqa_prep(self) -> Iterator[Case]:
        """A drafter's heads."""
        for m in self.rows:
            yield Case("gqa_prep", m, [partial(_call, "gqa_prep", drafter_cases.gqa_prep(self.tensors, m))])

    def convolve(self) -> Iterator[Case]:
        """A drafter's convolution."""
        for m in self.rows:
            yield Case("convolve", m, [partial(_call, "convolve", drafter_cases.convolve(self.tensors, m))])


def _call(op: str, fields: dict[str, Any]) -> None:
    stream = torch.cuda.current_stream().cuda_stream if torch.cuda.is_available() else 0
    abi.library().call(op, stream, **fields)


def _building(tensors: Tensors, m: int) -> dict[str, Any]:
    width = min(64, m - 1)
    steep = 1 + torch.rand(DRAFT, 1, generator=torch.Generator().manual_seed(m))
    lp = (-steep * (1 + torch.arange(width)).log() - 0.5)[None]
    one = {"budgets": m - 1, "depths": DRAFT, "starts": 1000}
    sizes = {"seqs": 1, "depth": DRAFT, "before": 1, "k": width, "max_nodes": m}
    candidates = {
        "lp": lp.to(tensors.device),
        "ids": tensors.ints(torch.arange(DRAFT * width).view(1, DRAFT, width), torch.int64),
    }
    made = {name: tensors.ints(torch.zeros(1, m)) for name in ("parents", "positions")}
    wide = {"tokens": tensors.ints(torch.zeros(1, m), torch.int64), "scores": torch.zeros(1, m, device=tensors.device)}
    wide |= {"ancestors": tensors.ints(torch.zeros(1, m, -(-m // 64)), torch.int64)}
    limits = {name: tensors.ints([value]) for name, value in one.items()}
    roots = {"roots": tensors.ints([7], torch.int64), "counts": tensors.ints([0])}
    return sizes | candidates | limits | roots | made | wide


def _accepting(tensors: Tensors, m: int) -> dict[str, Any]:
    nodes = torch.arange(m)[None]
    tokens = {"tokens": tensors.ints(nodes, torch.int64), "chosen": tensors.ints(2 * nodes + 1, torch.int64)}
    found = {"parents": tensors.ints([binary(m)]), "counts": tensors.ints([m])}
    made = {"path": tensors.ints(torch.zeros(1, m)), "lengths": tensors.ints([0])}
    return tokens | found | made | {"bonus": tensors.ints([0], torch.int64), "seqs": 1, "max_nodes": m}


def _torch_norm(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return F.rms_norm(x if residual is None else residual.add_(x), w.shape, w, EPS)


def _torch_silu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, 1)
    return F.silu(gate) * up


def _torch_router(logits: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scores = logits.sigmoid()
    ids = (scores + bias).topk(TOPK).indices
    weights = scores.gather(1, ids)
    return ids, weights / weights.sum(1, keepdim=True) * ROUTING.scale


def _torch_topk(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = x.topk(64)
    return values - x.logsumexp(1, keepdim=True), ids


def _torch_move(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return kv.index_copy_(1, target, kv.index_select(1, source))
