"""The nouns of kdtp: what travels between its processes, and the invariants of each.

Dimension letters used everywhere: M tree nodes or query rows, B sequences, V vocabulary, L draft depth,
K candidates per depth, R rows whose next token is chosen. A *row* is a place in the KV cache, a *position* is the
RoPE position of a token: siblings of a tree share a position, never a row.

Every struct here is decoded from MessagePack by type (msgspec): unknown fields, wrong types and broken invariants
are refused by the decoder, so a value of one of these types is known to be well formed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeAlias

from msgspec import Meta, Struct

if TYPE_CHECKING:
    import torch

PROTOCOL_VERSION = 1
PAGE_ROWS = 64  # rows of latent KV in one page, on every rank
ROOT = -1  # "parent" of node 0
NO_TOKEN = -1  # in Ids: the row's logits hold NaN, no token can be chosen there

Token: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**53)]
_INT64 = Meta(ge=-(2**63), le=2**63 - 1)
Seed: TypeAlias = Annotated[int, _INT64]
Pid: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
Text: TypeAlias = Annotated[str, Meta(max_length=1 << 16)]


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node (root 0) from parent indices that precede their children."""
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent == ROOT else depth[parent] + 1)
    return depth


def check_parents(parents: Sequence[int]) -> None:
    """Raise ValueError unless node 0 is the root and every other parent precedes its child."""
    for i, parent in enumerate(parents):
        legal = parent == ROOT if i == 0 else 0 <= parent < i
        if not legal:
            raise ValueError(f"parents[{i}] = {parent}: want {ROOT if i == 0 else f'0..{i - 1}'}")


class Tree(Struct, frozen=True):
    """A draft tree. Node 0 is the root, the last token chosen and not yet run through the target.

    tokens [M]: token id of each node; parents [M]: index of each node's parent, ROOT for node 0.
    Invariants: parents[i] < i, siblings have distinct tokens.
    """

    tokens: tuple[Token, ...]
    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents):
            raise ValueError(f"a tree of {len(self.tokens)} tokens and {len(self.parents)} parents")
        check_parents(self.parents)
        if len(set(zip(self.parents, self.tokens, strict=True))) != len(self.tokens):
            raise ValueError("siblings share a token")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depths(self) -> list[int]:
        """Depth of each node, [M]; the root is 0."""
        return depths(self.parents)


class Path(Struct, frozen=True):
    """The walk of one tree: `rows` are the accepted nodes, root first; `bonus` is the target's choice at the last.

    bonus is NO_TOKEN where the target's logits at that node hold NaN.
    """

    rows: tuple[int, ...]
    bonus: int


@dataclass(frozen=True)
class Marginals:
    """A drafter's per-depth distributions: the K best of each depth, by (logit descending, id ascending).

    lp  float32 [L, K]: log-probability under the full softmax of that depth, never above 0 (-inf: not a candidate)
    ids int64   [L, K]: token ids
    """

    lp: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class Trie:
    """Candidates whose scores depend on their parent, as n-gram lookup and DFlash2 give them.

    Node i + 1 has tokens[i], the parent parents[i] (0 is the root, which is not listed; parents[i] <= i) and
    lp[i] <= 0, its log-probability given that parent. Siblings have distinct tokens.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    lp: Sequence[float]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) == len(self.lp), "a trie's lists differ in length"


Proposal = Marginals | Trie


class Rule(Struct, frozen=True, forbid_unknown_fields=True):
    """How one sequence's tokens are chosen from logits. temperature 0 is argmax; the rest then has no effect."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Seed = 0


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True):
    """What a request asks for.

    max_tokens: upper bound on emitted tokens; temperature: 0 is greedy (argmax, lowest id among equals), else 1e-5..2;
    top_k: 0 is off; top_p: (0, 1]; min_p: [0, 1); seed: with it, the text is a function of prompt and seed;
    stop_tokens: emitted, then the request ends with finish_reason "stop"; ignore_eos: the model's own end tokens
    do not stop. Raises ValueError naming key, value and what is legal.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: Seed = 0
    stop_tokens: tuple[Token, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _legal("max_tokens", self.max_tokens, 1 <= self.max_tokens <= 1 << 24, "1..16777216")
        # Below 1e-5 logits / temperature could overflow float32.
        legal = self.temperature == 0.0 or 1e-5 <= self.temperature <= 2.0
        _legal("temperature", self.temperature, legal, "0 (greedy) or 1e-5..2")
        _legal("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0, at most 1")
        _legal("top_k", self.top_k, 0 <= self.top_k < 1 << 31, "0 (off) or a count")
        _legal("min_p", self.min_p, 0.0 <= self.min_p < 1.0, "at least 0, below 1")
        _legal("seed", self.seed, -(2**63) <= self.seed < 2**63, "a signed 64-bit integer")
        _legal("stop_tokens", self.stop_tokens, len(self.stop_tokens) <= 1024, "at most 1024 ids")

    @property
    def rule(self) -> Rule:
        """The part of the parameters that decides a token."""
        return Rule(self.temperature, self.top_k, self.top_p, self.min_p, self.seed)


def _legal(key: str, value: object, ok: bool, want: str) -> None:
    if not ok or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{key} = {value!r}: must be {want}")


# ---------------------------------------------------------------- coordinator -> worker


class SeqRows(Struct, frozen=True, forbid_unknown_fields=True):
    """The rows of one sequence in one forward: a prefill chunk, a single token, or a tree to verify.

    seq: the sequence; start: tokens of it whose KV is committed, so row i is stored at start + i and has position
    start + depth(i); tokens, parents [M]: as in Tree (a chunk is a chain); new_pages: appended to its page table
    before the forward; pick: the last `pick` rows get a token chosen (0: an inner prefill chunk, M: a tree).
    """

    seq: Count
    start: Count
    tokens: tuple[Token, ...]
    parents: tuple[int, ...]
    pick: Count
    rule: Rule
    new_pages: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents) or self.pick > len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.parents)} parents, pick {self.pick}")
        check_parents(self.parents)


class Forward(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Run one ragged batch and choose the tokens. Answered by Ids (or Fault) with the same epoch and step.

    Without sequences it is a ping: answered, nothing run.
    """

    epoch: Count
    step: Count
    seqs: tuple[SeqRows, ...]
    want_logits: bool = False  # also send the picked rows' logits (used by --check)


class Move(Struct, frozen=True, forbid_unknown_fields=True):
    """Keep node rows[k] of `seq` as committed row start + k; rows are rising and rows[0] is the root, 0."""

    seq: Count
    start: Count
    rows: tuple[Count, ...]

    def __post_init__(self) -> None:
        if not self.rows or self.rows[0] != 0 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"kept rows {self.rows}: must rise from 0")


class Commit(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Compact the accepted rows of `step`, and forget the sequences of `released`. Not answered."""

    epoch: Count
    step: Count
    moves: tuple[Move, ...] = ()
    released: tuple[Count, ...] = ()


class Welcome(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The coordinator's answer to Hello: everything a worker needs to know. `config` is EngineConfig as a mapping."""

    epoch: Count
    coordinator_pid: Pid
    config: dict[str, object]
    config_hash: Text


class Shutdown(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """End in good order (reason: why, for the log)."""

    reason: Text


ToWorker = Welcome | Forward | Commit | Shutdown

# ---------------------------------------------------------------- worker -> coordinator


class Hello(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A worker's first message."""

    protocol: Count
    version: Text
    rank: Count
    world_size: Count
    pid: Pid


class Progress(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Bytes of weights this rank has loaded, of how many."""

    epoch: Count
    rank: Count
    done: Count
    total: Count


class Ready(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Weights are loaded and the first collective has run."""

    epoch: Count
    rank: Count
    config_hash: Text
    model_hash: Text


class Ids(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Tokens chosen by one forward: for each of its SeqRows in order, `pick` ids (NO_TOKEN where the logits hold NaN).

    Every rank sends the same ids, so that the coordinator sees ranks that have parted.

    shape: (R, V) of the float32 logits in the frame after this message, only from rank 0 and only if asked.
    """

    epoch: Count
    step: Count
    rank: Count
    ids: tuple[Annotated[int, Meta(ge=NO_TOKEN, lt=2**31)], ...]
    shape: tuple[Count, Count] | None = None


class Fault(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """This rank cannot go on."""

    epoch: Count
    step: Count
    rank: Count
    text: Text


FromWorker = Hello | Progress | Ready | Ids | Fault

# ---------------------------------------------------------------- client <-> coordinator (RPC)


class Submit(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Start a request. `request` is the client's own label, unique among its open ones."""

    request: Count
    prompt: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=1 << 24)]
    params: SamplingParams
    speculate: bool = True  # False: plain decoding, whatever the engine's drafter (the reference for --check)
    want_logits: bool = False


class Cancel(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Stop a request; it ends with Finished, reason "cancelled". An unknown label is counted and ignored."""

    request: Count


class StatusQuery(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Ask for Status. `upto`: the newest label this client has used; the answer repeats it."""

    upto: Count = 0


class ShutdownQuery(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """End the engine: open requests fail with code "shutdown"."""


ToEngine = Submit | Cancel | StatusQuery | ShutdownQuery


class Usage(Struct, frozen=True, forbid_unknown_fields=True):
    """What one request cost. Tokens are counted as emitted, after every cut.

    rounds: verify forwards; forwards: those and the prefill chunks; committed: the sum over rounds of the rows that
    were kept, root included, and whose token was emitted; drafted_by_depth / accepted_by_depth: rounds in which a
    node of depth d + 1 was offered / accepted; timings_ms: by stage, whole rounds this request took part in.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    rounds: int = 0
    forwards: int = 0
    committed: int = 0
    drafted_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    timings_ms: dict[str, float] = {}


class Tokens(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Newly emitted tokens; `position` is the index of the first among the request's emitted tokens."""

    request: Count
    position: Count
    tokens: tuple[Token, ...]
    shape: tuple[Count, Count] | None = None  # (len(tokens), V) of the float32 logits in the next frame, if asked


class Finished(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The request's terminal event. reason: "stop", "length" or "cancelled"."""

    request: Count
    reason: Text
    usage: Usage


class Failed(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The request's terminal event when it could not be served.

    code: "invalid" (the request), "capacity" (queue full), "shutdown", or "engine" (a rank died, hung or diverged).
    request is None when the message that failed had no readable label.
    """

    request: Count | None
    code: Text
    message: Text


class Status(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A picture of the engine. state: "loading" or "ready".

    upto: of the query; open: this client's open requests at that time. A label up to `upto` that is not open has had
    its terminal event, or the event was lost because this client did not read.
    """

    upto: Count
    open: tuple[Count, ...]
    state: Text
    pid: Pid
    version: Text
    tp: Count
    step: Count
    running: Count
    waiting: Count
    pages_total: Count
    pages_free: Count
    load_done: Count
    load_total: Count
    worker_pids: tuple[Pid, ...]
    counters: dict[str, int]
    model: Text
    vocab_size: Count
    max_positions: Count


FromEngine = Tokens | Finished | Failed | Status
