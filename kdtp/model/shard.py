"""One rank's shard of the target model behind its one entry, `forward_tokens`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from kdtp import kernels
from kdtp.model import rope
from kdtp.model.batch import Batch, plan_device, plan_host
from kdtp.model.cache import PagedCache
from kdtp.model.comm import Comm
from kdtp.model.layers import Mlp, Norm
from kdtp.model.mla import Mla, Query
from kdtp.model.moe import Moe, routing
from kdtp.model.weights.kdtr import Reader
from kdtp.model.weights.load import CPU, Progress, Weights
from kdtp.types import PAGE_ROWS, Move, SeqRows


@dataclass(frozen=True)
class Layer:
    """One layer; two all-reduces, after attention and after the MLP."""

    attn_norm: Norm
    attention: Mla
    mlp_norm: Norm
    mlp: Mlp | Moe
    comm: Comm

    def __call__(
        self, delta: torch.Tensor, residual: torch.Tensor, batch: Batch, kv: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream is residual + delta, both [M, H]; the sum is left to the norm that follows."""
        residual, x = self.attn_norm.add(delta, residual)
        delta = self.comm.all_reduce(self.attention(x, batch, kv))
        residual, x = self.mlp_norm.add(delta, residual)
        delta = self.mlp(x, len(batch.rows)) if isinstance(self.mlp, Moe) else self.mlp(x)
        return self.comm.all_reduce(delta), residual


class Shard:
    """Heads, experts' inner width, dense width and vocabulary of one rank, and its KV rows.

    vocab_start: the token id of the first logit. Collectives inside: every rank makes the same calls.
    """

    def __init__(self, weights: Weights, comm: Comm, pages: int, poison: bool = False) -> None:
        self.config = weights.config
        self.comm = comm
        self.model_hash = weights.model_hash
        self.device = weights.device
        self.cache = PagedCache(self.config, pages, weights.dtype, poison, self.device)
        self.vocab_start = weights.vocab_start
        self._cos, self._sin = rope.tables(self.config, pages * PAGE_ROWS, self.device)
        self._embed = weights.take("embed")
        self._layers = [_layer(weights, comm, i) for i in range(self.config.num_hidden_layers)]
        self._final_norm = Norm(weights.take("final_norm"), self.config.rms_norm_eps)
        self._head = kernels.stored(weights.take("head"))

    @classmethod
    def load(
        cls, path: str, comm: Comm, dtype: str, pages: int, progress: Progress, device: torch.device = CPU
    ) -> Shard:
        """Read this rank's part of a KDTR model file, with `pages` pages of KV cache; errors as Weights."""
        with Reader(path) as reader:
            return cls(Weights(reader, comm.rank, comm.size, dtype, progress, device), comm, pages)

    def forward_tokens(self, seqs: Sequence[SeqRows]) -> torch.Tensor:
        """Run a ragged batch: prefill is a causal chunk, plain decoding a tree of one node, verification a tree.

        Writes row i of a sequence to its cache row start + i, at position start + depth -> float32 logits
        [R, ceil(V / size)] of the picked rows, this rank's part of the vocabulary, -inf behind its end. A row's
        logits depend on its own text only, bit for bit. Raises as PagedCache, ValueError for a token id.
        """
        self._check_tokens(seqs)
        for seq in seqs:
            self.cache.append(seq.seq, seq.new_pages)
        logits = self._no_logits(sum(seq.pick for seq in seqs))
        with torch.inference_mode():
            plan = plan_host if self.device.type == "cpu" else plan_device
            batch = plan(seqs, self.cache, self._cos, self._sin)
            hidden = self._hidden(batch)[batch.picked]
            if len(hidden):
                logits[:, : self._head.shape[1]] = kernels.linear(self._final_norm(hidden), self._head)
        return logits

    def _hidden(self, batch: Batch) -> torch.Tensor:
        delta = self.comm.all_reduce(kernels.embedding(batch.tokens, self._embed, self.vocab_start))
        residual = torch.zeros_like(delta)
        for layer, kv in zip(self._layers, self.cache.kv, strict=True):
            delta, residual = layer(delta, residual, batch, kv)
        return residual + delta

    def _no_logits(self, rows: int) -> torch.Tensor:
        # The ranks' parts have one width, so that they can be gathered; the last ones may hold less.
        width = -(-self.config.vocab_size // self.comm.size)
        return torch.full((rows, width), -torch.inf, device=self.device)

    def commit(self, moves: Iterable[Move]) -> None:
        """Make the kept rows of verified trees committed ones."""
        for move in moves:
            self.cache.move(move.seq, move.start, move.rows)

    def release(self, seqs: Iterable[int]) -> None:
        """Forget sequences and their rows."""
        self.cache.release(seqs)

    def _check_tokens(self, seqs: Sequence[SeqRows]) -> None:
        for seq in seqs:
            if max(seq.tokens) >= self.config.vocab_size:
                raise ValueError(f"sequence {seq.seq}: token {max(seq.tokens)} of {self.config.vocab_size}")


def _layer(weights: Weights, comm: Comm, i: int) -> Layer:
    def take(name: str) -> torch.Tensor:
        return weights.take(f"layers.{i}.{name}")

    def norm(name: str) -> Norm:
        return Norm(take(name), weights.config.rms_norm_eps)

    def matrix(*names: str) -> torch.Tensor:
        return kernels.stored(torch.cat([take(name) for name in names], -1))

    def mlp(prefix: str) -> Mlp:
        return Mlp(matrix(f"{prefix}w_gate", f"{prefix}w_up"), matrix(f"{prefix}w_down"))

    def moe() -> Moe:
        bias = take("router_bias") if config.topk_method == "noaux_tc" else None
        shared = mlp("shared.") if config.n_shared_experts else None
        experts = matrix("experts.w_gate", "experts.w_up"), matrix("experts.w_down")
        return Moe(routing(config), matrix("router"), bias, *experts, shared)

    def attention() -> Mla:
        low_rank = config.q_lora_rank > 0
        w_in = matrix("w_q_a" if low_rank else "w_q", "w_kv_a")
        query = Query(norm("q_a_norm"), matrix("w_q_b")) if low_rank else None
        return Mla(config, w_in, query, norm("kv_a_norm"), matrix("w_kc"), matrix("w_vc"), matrix("w_o"))

    config = weights.config
    return Layer(norm("attn_norm"), attention(), norm("mlp_norm"), moe() if config.is_moe[i] else mlp(""), comm)
