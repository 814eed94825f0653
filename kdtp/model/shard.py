"""One rank's shard of the target model behind its one `forward`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from kdtp import kernels
from kdtp.model import rope
from kdtp.model.batch import Batch, place, plan_host
from kdtp.model.cache import PagedCache
from kdtp.model.comm import Comm
from kdtp.model.graphs import ROWS, Graphs, bucket, usual
from kdtp.model.indices import Shape, exact, plan_device
from kdtp.model.layers import Mlp, Norm
from kdtp.model.mla import Mla, Query
from kdtp.model.moe import Experts, Int4Experts, Moe, router_matrix, routing
from kdtp.model.weights.load import CPU, Progress, Weights, open_model
from kdtp.types import PAGE_ROWS, Move, SeqRows


@dataclass(frozen=True)
class Layer:
    """One layer; two all-reduces, of what the layer before and attention have left to add."""

    attn_norm: Norm
    attention: Mla
    mlp_norm: Norm
    mlp: Mlp | Moe
    comm: Comm

    def __call__(
        self,
        delta: torch.Tensor,
        residual: torch.Tensor,
        batch: Batch,
        kv: torch.Tensor,
        taps: Sequence[torch.Tensor] = (),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream is residual + delta, both [M, H], delta a partial sum: what is left to do goes with the norm.

        taps [M, H]: get the stream that comes in.
        """
        residual, x = self.comm.all_reduce_norm(delta, residual, self.attn_norm)
        for tap in taps:
            tap.copy_(residual)
        delta = self.attention(x, batch, kv)
        residual, x = self.comm.all_reduce_norm(delta, residual, self.mlp_norm)
        return self.mlp(x, batch) if isinstance(self.mlp, Moe) else self.mlp(x), residual


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
        self.embed = weights.take("embed")
        self._layers = [_layer(weights, comm, i) for i in range(self.config.num_hidden_layers)]
        self._final_norm = Norm(weights.take("final_norm"), self.config.rms_norm_eps)
        self.head = weights.matrix("head")
        self.features: torch.Tensor | None = None
        self._taps: tuple[int, ...] = ()
        self.best: torch.Tensor | None = None
        self._graphs: Graphs | None = None

    @classmethod
    def load(
        cls, path: str, comm: Comm, dtype: str, pages: int, progress: Progress, device: torch.device = CPU
    ) -> Shard:
        """Read this rank's part of a model, with `pages` pages of KV cache; errors as open_model and Weights."""
        with open_model(path) as source:
            return cls(Weights(source, comm.rank, comm.size, dtype, progress, device), comm, pages)

    def forward_tokens(self, seqs: Sequence[SeqRows]) -> torch.Tensor:
        """Run a ragged batch: prefill is a causal chunk, plain decoding a tree of one node, verification a tree.

        Writes row i of a sequence to its cache row start + i, at position start + depth -> float32 logits
        [R, ceil(V / size)] of the picked rows, this rank's part of the vocabulary, -inf behind its end. A row's
        logits depend on its own text only, bit for bit. Raises as PagedCache, ValueError for a token id, RuntimeError
        for a sequence that comes twice.
        """
        found = self.forward(seqs)
        # The ranks' parts have one width, so that they can be gathered; the last ones may hold less. Made now, while a
        # GPU is at work already, and so that they may be written to.
        width = -(-self.config.vocab_size // self.comm.size)
        logits = torch.full((len(found), width), -torch.inf, device=self.device)
        logits[:, : found.shape[1]] = found
        return logits

    def forward(self, seqs: Sequence[SeqRows]) -> torch.Tensor:
        """As `forward_tokens`, but logits of the ids that this rank has, as they come, for looking at until the next
        call. If a graph has run it, `best` are the best ids of all ranks for the picked rows, else None."""
        self._check(seqs)
        for seq in seqs:
            self.cache.append(seq.seq, seq.new_pages, seq.start)
        picked = sum(seq.pick for seq in seqs)
        self.best = None
        with torch.inference_mode():
            found = self._on_cpu(seqs) if self.device.type == "cpu" else self._on_gpu(seqs)
        if self.best is not None:
            self.best = self.best[:picked]
        return found[:picked]

    def capture(self, seqs: int, nodes: int, best: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """From now on, run batches of few rows as CUDA graphs; only on a GPU, and on all ranks or none.

        Captured now: plain decoding of up to `seqs` sequences, and trees of `nodes` nodes; others when first needed.
        best: this rank's logits [R, n] -> the best id of each row on all ranks, [R]; part of the graphs, and no part of
        a cycle with this shard.
        """
        self._best_of = best
        self._graphs = Graphs(self.head.new_empty(ROWS[-1], self.head.shape[1]))
        with torch.inference_mode():
            for shape in usual(seqs, nodes):
                self._graphs.capture(self._captured, shape)

    @property
    def rows(self) -> int:
        """Rows of the KV cache."""
        return self.cache.pages * PAGE_ROWS

    def tap(self, layers: Sequence[int], into: torch.Tensor | None = None) -> torch.Tensor:
        """From now on, `features` are the residual stream of the last forward's rows after each of these layers, side
        by side, [M, taps * H]: what a drafter is made to read. Returns the place where batches of few rows leave
        them, which is `into` if that is given. Before `capture`: graphs hold it."""
        assert all(0 <= i < len(self._layers) for i in layers), f"layers {layers} of {len(self._layers)}"
        assert self._graphs is None, "graphs were captured without taps"
        self._taps = tuple(layers)
        width = len(layers) * self.config.hidden_size
        self._tapped = self.embed.new_zeros(ROWS[-1], width) if into is None else into
        return self._tapped

    def line(self, seq: int, count: int) -> torch.Tensor:
        """The cache row of each of the first `count` rows of a sequence, int64 [count], on the host."""
        return self.cache.line(seq, count)

    def places(self, seq: int, start: int, count: int) -> list[int]:
        """As `line`, of `count` rows from row `start` on."""
        return self.cache.places(seq, start, count)

    @property
    def graphs(self) -> int:
        """Graphs captured so far."""
        return 0 if self._graphs is None else len(self._graphs)

    def _on_cpu(self, seqs: Sequence[SeqRows]) -> torch.Tensor:
        return self._logits(plan_host(seqs, self.cache, self._cos, self._sin))

    def _on_gpu(self, seqs: Sequence[SeqRows]) -> torch.Tensor:
        shape = bucket(seqs)
        if self._graphs is not None and shape is not None:
            self.comm.note("replay", shape)
            logits, self.best = self._graphs.run(self._captured, shape, plan_device(seqs, self.cache, shape))
            if self._taps:
                self.features = self._tapped[: shape.rows]
            return logits
        shape = exact(seqs)
        return self._run(plan_device(seqs, self.cache, shape).to(self.device, non_blocking=True), shape)

    def _captured(self, indices: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self._run(indices, shape)
        return logits, self._best_of(logits)

    def _run(self, indices: torch.Tensor, shape: Shape) -> torch.Tensor:
        return self._logits(place(indices, shape, self._cos, self._sin))

    def _logits(self, batch: Batch) -> torch.Tensor:
        """Of the picked rows, [R, n] for the n token ids of this rank."""
        hidden = self._hidden(batch).index_select(0, batch.picked)
        if not len(hidden):
            return hidden.new_empty(0, self.head.shape[1])
        return kernels.linear(self._final_norm(hidden), self.head)

    def _hidden(self, batch: Batch) -> torch.Tensor:
        delta = kernels.embedding(batch.tokens, self.embed, self.vocab_start)
        residual = torch.zeros_like(delta)
        after = self._tap_rows(len(delta)) if self._taps else {}
        for i, (layer, kv) in enumerate(zip(self._layers, self.cache.kv, strict=True)):
            delta, residual = layer(delta, residual, batch, kv, after.get(i - 1, ()))
        hidden = residual + self.comm.all_reduce(delta)
        for tap in after.get(len(self._layers) - 1, ()):
            tap.copy_(hidden)
        return hidden

    def _tap_rows(self, rows: int) -> dict[int, list[torch.Tensor]]:
        """By layer, where the stream after it goes: parts of `features`."""
        wide = self._tapped.shape[1]
        # Batches of few rows, those of graphs too, have one place.
        self.features = self._tapped[:rows] if rows <= len(self._tapped) else self._tapped.new_empty(rows, wide)
        after: dict[int, list[torch.Tensor]] = {}
        for layer, part in zip(self._taps, self.features.chunk(len(self._taps), 1), strict=True):
            after.setdefault(layer, []).append(part)
        return after

    def commit(self, moves: Sequence[Move]) -> None:
        """Make the kept rows of verified trees committed ones."""
        self.cache.move(moves)

    def release(self, seqs: Iterable[int]) -> None:
        """Forget sequences and their rows."""
        self.cache.release(seqs)

    def _check(self, seqs: Sequence[SeqRows]) -> None:
        if len({seq.seq for seq in seqs}) != len(seqs):
            raise RuntimeError(f"a batch with a sequence twice: {[seq.seq for seq in seqs]}")
        for seq in seqs:
            if max(seq.tokens) >= self.config.vocab_size:
                raise ValueError(f"sequence {seq.seq}: token {max(seq.tokens)} of {self.config.vocab_size}")


def _layer(weights: Weights, comm: Comm, i: int) -> Layer:
    def take(name: str) -> torch.Tensor:
        return weights.take(f"layers.{i}.{name}")

    def norm(name: str) -> Norm:
        return Norm(take(name), weights.config.rms_norm_eps)

    def matrix(*names: str) -> torch.Tensor:
        return weights.matrix(*[f"layers.{i}.{name}" for name in names])

    def mlp(prefix: str) -> Mlp:
        return Mlp(matrix(f"{prefix}w_gate", f"{prefix}w_up"), matrix(f"{prefix}w_down"))

    def experts() -> Experts | Int4Experts:
        gate, up, down = (f"layers.{i}.experts.{name}" for name in ("w_gate", "w_up", "w_down"))
        if weights.keeps_int4(gate, up, down):
            return Int4Experts.repacked(weights.int4(gate, up), weights.int4(down))
        return Experts(weights.matrix(gate, up), weights.matrix(down))

    def moe() -> Moe:
        bias = take("router_bias") if config.topk_method == "noaux_tc" else None
        shared = mlp("shared.") if config.n_shared_experts else None
        router = router_matrix(matrix("router"), weights.dtype)
        return Moe(routing(config), router, bias, experts(), shared)

    def attention() -> Mla:
        low_rank = config.q_lora_rank > 0
        w_in = matrix("w_q_a" if low_rank else "w_q", "w_kv_a")
        query = Query(norm("q_a_norm"), matrix("w_q_b")) if low_rank else None
        return Mla(config, w_in, query, norm("kv_a_norm"), matrix("w_kc"), matrix("w_vc"), matrix("w_o"))

    config = weights.config
    return Layer(norm("attn_norm"), attention(), norm("mlp_norm"), moe() if config.is_moe[i] else mlp(""), comm)
