"""A rank without a network: the engine's own worker process around a shard that knows the text by heart.

    RANK=0 WORLD_SIZE=1 python scripts/stub_rank.py --run-dir DIR

All of kdtp.engine.worker is run; only the shard is another. So what a round takes is what it takes outside the forward.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import torch

from kdtp.config import ModelConfig
from kdtp.engine import guard, worker
from kdtp.model.comm import Comm, Solo
from kdtp.types import SeqRows, depths

VOCAB = 512
TOGETHER = 1 << 40  # ids of sequences from here on
LENGTH = 1 << 14  # tokens of text
MODEL = ModelConfig(
    vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, first_k_dense_replace=1, num_attention_heads=4,
    q_lora_rank=0, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2, intermediate_size=8,
    moe_intermediate_size=0, n_routed_experts=0, num_experts_per_tok=0, n_shared_experts=0,
    max_position_embeddings=LENGTH - 128,
)  # fmt: skip


def text() -> list[int]:
    """What the stub writes: three of four tokens follow from the one before, so that n-grams repeat and branch."""
    rng = random.Random(0)
    tokens = [0]
    while len(tokens) < LENGTH:
        tokens.append((5 * tokens[-1] + 3) % 64 if rng.random() < 0.75 else rng.randrange(64))
    return tokens


class StubShard:
    """What Worker asks of a Shard. The token chosen at a row is the text's at the next position.

    Every rank knows the whole vocabulary and chooses alone, so that a round is free of collectives, unless the first
    sequence's id is TOGETHER or above: then a rank has its part of the vocabulary, and they choose as a model's ranks.
    """

    model_hash = "stub"
    best = None

    def __init__(self, comm: Comm) -> None:
        self.comm: Comm = Solo()
        self.vocab_start = 0
        self.config = MODEL
        self.device = torch.device("cpu")
        self._ranks = comm
        self._logits = torch.eye(VOCAB)
        self._text = torch.tensor(text())

    @classmethod
    def load(cls, path: str, comm: Comm, *rest: object) -> StubShard:
        """In the place of Shard.load; there is nothing to load."""
        return cls(comm)

    def forward(self, seqs: Sequence[SeqRows]) -> torch.Tensor:
        """Logits [R, VOCAB] of the picked rows, [R, VOCAB / size] if chosen together."""
        self.comm = self._ranks if seqs[0].seq >= TOGETHER else Solo()
        width = VOCAB // self.comm.size
        self.vocab_start = self.comm.rank * width
        places = [seq.start + 1 + depth for seq in seqs for depth in depths(seq.parents)[len(seq.tokens) - seq.pick :]]
        chosen = self._text[torch.tensor(places, dtype=torch.int64)]
        return self._logits[chosen, self.vocab_start : self.vocab_start + width]

    def commit(self, moves: object) -> None:
        """No KV is kept."""

    def release(self, seqs: object) -> None:
        """No KV is kept."""


if __name__ == "__main__":
    worker.Shard = StubShard
    guard.end_with_parent(os.getppid())
    guard.leave(worker.main())
