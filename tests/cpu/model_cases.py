"""Shards for tests: golden and random models, several ranks in one process, sequences of rows."""

import dataclasses
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from reference_cases import MICRO, MICRO_V3

from kdtp.model.comm import Comm, Solo, sum_in_order
from kdtp.model.shard import Shard
from kdtp.model.weights import kdtr
from kdtp.model.weights.load import Weights, open_model
from kdtp.types import Move, SeqRows
from reference.config import to_metadata
from reference.weights import random_weights

REFS = Path(__file__).resolve().parent.parent / "refs"
GOLDEN = {name: REFS / f"{name}.kdtr" for name in ("model_tiny", "model_v3")}
GROUPED = dataclasses.replace(
    MICRO,
    num_attention_heads=4,
    intermediate_size=20,
    moe_intermediate_size=8,
    n_routed_experts=6,
    n_shared_experts=0,
    scoring_func="softmax",
    topk_method="group_limited_greedy",
    n_group=3,
    topk_group=2,
    routed_scaling_factor=1.7,
)
RANDOM = {"micro": MICRO, "micro_v3": MICRO_V3, "grouped": GROUPED}


def write_random(path, config, seed=0, **changes):
    """A model file of random weights; `changes` are arrays that replace or join them, None takes one away."""
    arrays = random_weights(config, np.random.PCG64(seed)) | {k.replace("__", "."): v for k, v in changes.items()}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    kdtr.write(path, {"format": "kdtp-model", **to_metadata(config)}, arrays)
    return path


class ThreadComm(Comm):
    """Ranks that are threads of one process and meet at a barrier."""

    def __init__(self, rank, size, barrier, places):
        self.rank, self.size, self._barrier, self._places = rank, size, barrier, places

    def all_gather(self, x):
        self._places[self.rank] = x.clone()
        self._barrier.wait(60)
        parts = torch.stack(self._places)
        self._barrier.wait(60)
        return parts

    def all_reduce(self, x):
        return sum_in_order(self.all_gather(x))


class Ranks:
    """All shards of a model, called alike; unused KV rows are NaN, pages come in random order."""

    def __init__(self, path, tp=1, dtype="float32", pages=40, seed=0, threads=1):
        barrier, places = threading.Barrier(tp), [None] * tp
        comms = [ThreadComm(rank, tp, barrier, places) if tp > 1 else Solo() for rank in range(tp)]
        with open_model(path) as source:
            weights = [Weights(source, rank, tp, dtype, lambda done, total: None) for rank in range(tp)]
            self.shards = [Shard(w, comm, pages, poison=True) for w, comm in zip(weights, comms, strict=True)]
        self.config = self.shards[0].config
        self._barrier = barrier
        self._free = random.Random(seed).sample(range(pages), pages)
        self._pages = {}
        self._pool = ThreadPoolExecutor(tp, initializer=torch.set_num_threads, initargs=(threads,))

    def rows(self, seq, start, tokens, parents=None, pick=None):
        """SeqRows with the pages they need: a chain unless there are parents, every row picked unless told."""
        parents = tuple(range(-1, len(tokens) - 1)) if parents is None else tuple(parents)
        mine = self._pages.setdefault(seq, [])
        new = [self._free.pop() for _ in range(-(-(start + len(tokens)) // 64) - len(mine))]
        mine += new
        pick = len(tokens) if pick is None else pick
        return SeqRows(seq, start, tuple(map(int, tokens)), parents, pick, tuple(new))

    def forward(self, *seqs):
        """Logits of the picked rows over the whole vocabulary, [R, V]."""
        parts = self._each(lambda shard: shard.forward_tokens(seqs))
        logits = torch.cat(parts, 1)
        assert (logits[:, self.config.vocab_size :] == -torch.inf).all()
        return logits[:, : self.config.vocab_size]

    def run(self, seq, start, tokens, parents=None, pick=None):
        """The logits of one sequence's rows."""
        return self.forward(self.rows(seq, start, tokens, parents, pick))

    def commit(self, seq, start, kept):
        self._each(lambda shard: shard.commit([Move(seq, start, tuple(kept))]))

    def release(self, seq):
        self._each(lambda shard: shard.release([seq]))
        self._free += self._pages.pop(seq)

    def decode(self, seq, start, tokens):
        """One token after the other: [T, V]."""
        return torch.cat([self.run(seq, start + i, [token]) for i, token in enumerate(tokens)])

    def _each(self, call):
        def guarded(shard):
            try:
                return call(shard)
            except BaseException:
                self._barrier.abort()  # the other ranks would wait
                raise

        futures = [self._pool.submit(guarded, shard) for shard in self.shards]
        errors = [future.exception() for future in futures]
        # A rank that only lost its peers is not the one to name.
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
