"""The step of one TP=8 rank of Kimi K2.6, with random weights, from the ops of kernels.cuda in the order of kdtp.model.

Every op goes through a `Stage`, which runs it and may note it. Differences from kdtp.model: experts are INT4, the
router's matrix is bfloat16; other ranks to add up with are there only if `Sums` has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from kdtp.kernels import cuda
from kdtp.model.beside import beside
from scripts.k26 import (
    DENSE,
    DENSE_LAYERS,
    EPS,
    EXPERTS,
    HEADS,
    HIDDEN,
    INTER,
    KV_ROW,
    LORA,
    NOPE,
    Q_LORA,
    ROPE,
    ROUTING,
    SCALE,
    SHARED,
    VOCAB,
    Batch,
    Tensors,
    V,
    hit,
    kept,
)

Choice = tuple[torch.Tensor, torch.Tensor]  # ids int32, weights float32 [M, topk]
Reads = int | Callable[[], int]  # bytes that an op reads of weights or cache


class Stage(Protocol):
    """Runs `op` and gives its result."""

    def __call__(self, name: str, reads: Reads, op: Callable[..., Any], *inputs: Any) -> Any: ...


def run(name: str, reads: Reads, op: Callable[..., Any], *inputs: Any) -> Any:
    """The stage that notes nothing."""
    return op(*inputs)


@dataclass
class Notes:
    """The stage that keeps each op with its inputs, by name, to be run again alone."""

    calls: dict[str, list[Callable[[], Any]]] = field(default_factory=dict)
    reads: dict[str, int] = field(default_factory=dict)

    def __call__(self, name: str, reads: Reads, op: Callable[..., Any], *inputs: Any) -> Any:
        """Run and note."""
        self.calls.setdefault(name, []).append(partial(op, *inputs))
        self.reads[name] = self.reads.get(name, 0) + (reads if isinstance(reads, int) else reads())
        return op(*inputs)


class Sums:
    """What is done with partial sums: here, with no other rank, they are added to the residual and normed."""

    def first(self, x: torch.Tensor) -> torch.Tensor:
        """The residual of what the embedding gives [M, hidden]."""
        return x

    def add(self, delta: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[M, hidden] of what the next layer reads; delta comes on top of residual, in place."""
        return cuda.rms_norm(delta, weight, EPS, residual)


ALONE = Sums()


class Linear:
    """A matrix [in, out] by name."""

    def __init__(self, tensors: Tensors, name: str, inputs: int, outputs: int, out_f32: bool = False) -> None:
        self._name, self._out_f32 = name, out_f32
        self._w = tensors.matrix(inputs, outputs)

    def __call__(self, x: torch.Tensor, stage: Stage) -> torch.Tensor:
        """[M, in] -> [M, out]."""
        return stage(self._name, self._w.nbytes, cuda.linear, x, self._w, self._out_f32)


class Mlp:
    """SwiGLU."""

    def __init__(self, tensors: Tensors, name: str, inner: int) -> None:
        self._gate_up = Linear(tensors, f"{name} gate_up", HIDDEN, 2 * inner)
        self._down = Linear(tensors, f"{name} down", inner, HIDDEN)

    def __call__(self, x: torch.Tensor, choice: Choice | None, stage: Stage) -> torch.Tensor:
        """[M, hidden] -> [M, hidden]; there is nothing to choose."""
        return self._down(stage("silu_mul", 0, cuda.silu_mul, self._gate_up(x, stage)), stage)


class Moe:
    """INT4 experts and the shared one."""

    def __init__(self, tensors: Tensors) -> None:
        self._router = Linear(tensors, "router linear", HIDDEN, EXPERTS, out_f32=True)
        self._bias = tensors.normal(EXPERTS, scale=0.01, dtype=torch.float32)
        self._experts = (*tensors.experts(2 * INTER, HIDDEN), *tensors.experts(HIDDEN, INTER))
        self._shared = Mlp(tensors, "shared", SHARED)

    def __call__(self, x: torch.Tensor, choice: Choice | None, stage: Stage) -> torch.Tensor:
        """[M, hidden] -> [M, hidden]; the router runs, but counts only where nothing is chosen."""
        shared, ready = beside(x, partial(self._shared, x, None, stage))
        own = stage("router", 0, cuda.router, self._router(x, stage), self._bias, ROUTING)
        ids, weights = own if choice is None else choice

        def reads() -> int:
            return kept(self._experts) * hit(ids) // EXPERTS

        return stage("moe", reads, cuda.moe_int4, x, ids, weights, *self._experts, shared, ready)


class Attention:
    """MLA in absorbed form."""

    def __init__(self, tensors: Tensors) -> None:
        self._w_in = Linear(tensors, "q_a + kv_a", HIDDEN, Q_LORA + KV_ROW)
        self._q_norm, self._latent_norm = tensors.norm(Q_LORA), tensors.norm(LORA)
        self._q_b = Linear(tensors, "q_b", Q_LORA, HEADS * (NOPE + ROPE))
        self._w_kc, self._w_vc = tensors.matrices(HEADS, NOPE, LORA), tensors.matrices(HEADS, LORA, V)
        self._w_o = Linear(tensors, "w_o", HEADS * V, HIDDEN)

    def __call__(self, x: torch.Tensor, batch: Batch, kv: torch.Tensor, stage: Stage) -> torch.Tensor:
        """[M, hidden] -> [M, hidden]; writes the tree's rows into kv."""
        q_a, kv_new = self._w_in(x, stage).split([Q_LORA, KV_ROW], 1)
        q_a = stage("q_a norm", 0, cuda.rms_norm, q_a, self._q_norm, EPS)
        q = self._q_b(q_a, stage).view(-1, HEADS, NOPE + ROPE)
        places = (self._latent_norm, EPS, batch.cos, batch.sin, batch.rows, kv)
        absorbed = stage("mla_prep", 0, cuda.mla_prep, q, kv_new, *places)
        stage("w_kc", self._w_kc.nbytes, cuda.linear_heads, q[..., :NOPE], self._w_kc, absorbed[..., :LORA])
        seen = (batch.keys.max_start + len(batch.tokens)) * kv[0].nbytes
        latents = stage("mla_tree", seen, cuda.mla_tree, absorbed, kv, batch.keys, SCALE, LORA)
        out = stage("w_vc", self._w_vc.nbytes, cuda.linear_heads, latents, self._w_vc)
        return self._w_o(out.flatten(1), stage)


class Rank:
    """All layers; `cache_rows`: rows of each layer's cache."""

    def __init__(self, tensors: Tensors, layers: int, cache_rows: int) -> None:
        self._embed = tensors.normal(VOCAB, HIDDEN)
        self._norms = [tensors.norm(HIDDEN) for _ in range(2 * layers + 1)]
        self._attention = [Attention(tensors) for _ in range(layers)]
        dense = min(DENSE_LAYERS, layers)
        self._mlps: list[Mlp | Moe] = [Mlp(tensors, "dense", DENSE) for _ in range(dense)]
        self._mlps += [Moe(tensors) for _ in range(layers - dense)]
        self._head = Linear(tensors, "head", HIDDEN, VOCAB, out_f32=True)
        self._kv = [tensors.normal(cache_rows, KV_ROW) for _ in range(layers)]

    def step(self, batch: Batch, choices: Sequence[Choice | None], stage: Stage, sums: Sums = ALONE) -> Choice:
        """One forward over the tree -> each node's highest logit, float32 [M], and its token, int64 [M].

        choices: of each layer the experts, or None for the router's own; that of a dense layer is not read.
        """
        residual = sums.first(stage("embedding", 0, cuda.embedding, batch.tokens, self._embed, 0))
        x = stage("add + norm", 0, cuda.rms_norm, residual, self._norms[0], EPS)
        layers = zip(self._attention, self._mlps, self._kv, choices, strict=True)
        for i, (attention, mlp, kv, choice) in enumerate(layers):
            delta = attention(x, batch, kv, stage)
            x = stage("add + norm", 0, sums.add, delta, residual, self._norms[2 * i + 1])
            delta = mlp(x, choice, stage)
            x = stage("add + norm", 0, sums.add, delta, residual, self._norms[2 * i + 2])
        return stage("argmax", 0, cuda.argmax, self._head(x, stage), 0)
