"""A target without a network, for tests of the engine's bookkeeping: it stores tokens where a model stores KV.

The token chosen at a row is a function of the tokens that the row can see in the cache, as of a real model: a row
left behind, moved wrongly or shared by two sequences changes the text at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kdtp.config import ModelConfig
from kdtp.engine.link import LocalLink
from kdtp.messages import PROTOCOL_VERSION, Commit, Forward, Hello, Ids, Ready, Shutdown, ToWorker, Welcome
from kdtp.types import PAGE_ROWS
from kdtp.version import __version__

VOCAB = 97
POISON = -1


def model(**changes: object) -> ModelConfig:
    """The config that goes with the fake target."""
    values: dict[str, object] = dict(  # noqa: C408
        vocab_size=VOCAB, hidden_size=8, num_hidden_layers=1, first_k_dense_replace=1, num_attention_heads=4,
        q_lora_rank=0, kv_lora_rank=4, qk_nope_head_dim=2, qk_rope_head_dim=2, v_head_dim=2, intermediate_size=8,
        moe_intermediate_size=0, n_routed_experts=0, num_experts_per_tok=0, n_shared_experts=0,
        max_position_embeddings=200,
    )  # fmt: skip
    return ModelConfig(**{**values, **changes})  # type: ignore[arg-type]


def next_token(prefix: Sequence[int]) -> int:
    """The target's greedy choice after `prefix`."""
    return int.from_bytes(hashlib.blake2b(repr(list(prefix)).encode(), digest_size=4).digest()) % VOCAB


def continuation(prompt: Sequence[int], count: int) -> list[int]:
    """What plain greedy decoding gives."""
    text = list(prompt)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(prompt) :]


class FakeWorker:
    """Behind a LocalLink; `rows` is the paged cache of token ids."""

    def __init__(self, link: LocalLink, pages: int, rank: int = 0, size: int = 1) -> None:
        self.link = link
        self.rank = rank
        self.rows = [POISON] * (pages * PAGE_ROWS)
        self.tables: dict[int, list[int]] = {}
        self.shared: dict[int, int] = {}  # rows that a sequence found committed when it began
        self.step = 0
        self.forwards = 0
        self.moved = 0
        link.handle = self.handle
        link.emit(Hello(PROTOCOL_VERSION, __version__, rank, size, 1))

    def handle(self, message: ToWorker) -> None:
        match message:
            case Welcome():
                self.epoch = message.epoch
                self.link.emit(Ready(message.epoch, self.rank, message.config_hash, "fake"))
            case Forward():
                assert message.step == self.step + 1, (message.step, self.step)
                self.step = message.step
                self.forwards += bool(message.seqs)
                ids = [token for seq in message.seqs for token in self._run(seq)]
                self.link.emit(Ids(self.epoch, self.step, self.rank, tuple(ids)))
            case Commit():
                assert message.step == self.step
                self._commit(message)
            case Shutdown():
                pass

    def _at(self, seq: int, row: int) -> int:
        return self.tables[seq][row // PAGE_ROWS] * PAGE_ROWS + row % PAGE_ROWS

    def _run(self, seq) -> list[int]:
        self._take(seq)
        for i, token in enumerate(seq.tokens):
            self.rows[self._at(seq.seq, seq.start + i)] = token
        chosen = []
        for i in range(len(seq.tokens) - seq.pick, len(seq.tokens)):
            path, node = [], i
            while node != -1:
                path.append(node)
                node = seq.parents[node]
            seen = [*range(seq.start), *(seq.start + n for n in reversed(path))]
            prefix = [self.rows[self._at(seq.seq, row)] for row in seen]
            assert POISON not in prefix, "a row that was never written"
            chosen.append(next_token(prefix))
        return chosen

    def _take(self, seq) -> None:
        """Append new pages, which are empty but for those that the sequence found committed when it began."""
        shared = 0 if seq.seq in self.tables else seq.start // PAGE_ROWS
        assert seq.start >= self.shared.setdefault(seq.seq, seq.start), "a write to a shared row"
        owned = {page for table in self.tables.values() for page in table}
        assert not owned & set(seq.new_pages[shared:]), "a page of another sequence"
        for page in seq.new_pages[shared:]:
            self.rows[page * PAGE_ROWS : (page + 1) * PAGE_ROWS] = [POISON] * PAGE_ROWS
        self.tables.setdefault(seq.seq, []).extend(seq.new_pages)

    def _commit(self, commit: Commit) -> None:
        for move in commit.moves:
            self.moved += 1
            kept = [self.rows[self._at(move.seq, move.start + row)] for row in move.rows]
            for k, token in enumerate(kept):
                self.rows[self._at(move.seq, move.start + k)] = token
        for seq in commit.released:
            del self.tables[seq], self.shared[seq]
