"""The nouns of kdtp: trees, rules and rows, and the invariants of each.

Dimension letters used everywhere: M tree nodes or query rows, B sequences, V vocabulary, L draft depth,
K candidates per depth, R rows whose next token is chosen. A *row* is a place in the KV cache, a *position* is the
RoPE position of a token: siblings of a tree share a position, never a row.

Structs travel in the messages of kdtp.messages, whose decoder refuses broken invariants: a value that was received is
known to be well formed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

TILE = 4  # rows of every product on a CPU, filled up with zeros: kdtp.kernels.linear says why
PAGE_ROWS = 64  # rows of latent KV in one page, on every rank
# Of a rank on a CPU. From 9 on, MKL for Intel cuts the 4 rows of a product between threads, not summed alike.
MOST_THREADS = 8
# Rows of the batches that CUDA graphs are captured for; above 8, whole tiles of the kernels, and from 256 on, attention
# takes no more memory for a longer context.
GRAPH_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512)
SHAPES = ("tree", "chain", "seeded")  # of draft trees, as kdtp.spec.tree grows them; in the order of csrc/params.h
WIDE = 1024  # hidden size from which more CPU threads than one pay; below, they mostly wait for each other
ROOT = -1  # "parent" of node 0
NO_TOKEN = -1  # instead of an id: the row's logits hold NaN, or its rule allows no id
MOST_LOGPROBS = 20  # beside the chosen id

Token: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]
Count: TypeAlias = Annotated[int, Meta(ge=0, lt=2**53)]
_INT64 = Meta(ge=-(2**63), le=2**63 - 1)
Seed: TypeAlias = Annotated[int, _INT64]


def power(least: int) -> int:
    """The first power of two from `least` on."""
    return 1 << max(least - 1, 0).bit_length()


def page_rows(pages: Sequence[int], start: int, count: int) -> list[int]:
    """The row of the pool of each of `count` rows from row `start` on, of a sequence that has these pages."""
    return [pages[row // PAGE_ROWS] * PAGE_ROWS + row % PAGE_ROWS for row in range(start, start + count)]


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node (root 0) from parent indices that precede their children."""
    depth: list[int] = []
    for parent in parents:
        depth.append(0 if parent == ROOT else depth[parent] + 1)
    return depth


def check_parents(parents: Sequence[int]) -> None:
    """Raise ValueError unless node 0 is the root and every other parent precedes its child."""
    rising = all(map(operator.lt, parents, range(len(parents))))
    if rising and min(parents[1:], default=0) >= 0 and tuple(parents[:1]) == (ROOT,):
        return  # every tree of every round comes here
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


Bias: TypeAlias = tuple[tuple[Token, float], ...]
TokenIds: TypeAlias = tuple[Token, ...]


class Rule(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """How one sequence's tokens are chosen from logits, step by step in the order of the fields.

    allowed: if not empty, no other id; banned: never; held: not at positions below held_until; logit_bias: (id, what
    is added); repetition_penalty: of ids in prompt or output, presence and frequency penalty: of ids in the output;
    temperature 0 is argmax, and what follows has no effect then.
    """

    allowed: TokenIds = ()
    banned: TokenIds = ()
    held: TokenIds = ()
    held_until: Count = 0
    logit_bias: Bias = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Seed = 0

    @property
    def counts(self) -> bool:
        """Whether the choice depends on how often an id has come."""
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0

    @property
    def edits(self) -> bool:
        """Whether logits are changed before temperature and filters."""
        return self.counts or bool(self.allowed or self.banned or self.held or self.logit_bias)

    @property
    def filters(self) -> bool:
        """Whether a draw is from a part of the vocabulary."""
        return self.temperature > 0.0 and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)


_ALIKE = Rule.__struct_fields__[5:]  # in Rule and SamplingParams


class Grammar(Struct, frozen=True, forbid_unknown_fields=True):
    """What an output must match: a JSON schema, a regular expression, or a grammar in llguidance's dialect of Lark."""

    kind: Literal["json_schema", "regex", "lark"]
    text: Annotated[str, Meta(min_length=1, max_length=1 << 18)]


class SamplingParams(Struct, frozen=True, forbid_unknown_fields=True):
    """What a request asks for.

    max_tokens: upper bound on emitted tokens, 0 only with prompt_logprobs; temperature: 0 is greedy (argmax, lowest id
    among equals), else 1e-5..2; top_k: 0 is off; top_p: (0, 1]; min_p: [0, 1); seed: with it, the text is a function
    of prompt and seed; stop_tokens: emitted, then the request ends with finish_reason "stop"; ignore_eos: the model's
    own end tokens do not stop; min_tokens: no stop before that many.
    repetition_penalty: above 1 against ids of prompt and output; presence_penalty, frequency_penalty: above 0 against
    ids of the output; logit_bias: by id, -100..100; allowed_tokens: if any, no other id is chosen; banned_tokens;
    grammar: what the output must match, which the model's own end tokens then end.
    logprobs, prompt_logprobs: of each emitted or prompt token the log-probability under the model's own distribution
    (before anything above), and of so many of the best beside it; None: not wanted.
    Raises ValueError naming key, value and what is legal.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: Seed = 0
    stop_tokens: TokenIds = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Token, float] = {}
    allowed_tokens: TokenIds = ()
    banned_tokens: TokenIds = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        least = 1 if self.prompt_logprobs is None else 0
        _legal("max_tokens", self.max_tokens, least <= self.max_tokens <= 1 << 24, f"{least}..16777216")
        # Below 1e-5 logits / temperature could overflow float32.
        legal = self.temperature == 0.0 or 1e-5 <= self.temperature <= 2.0
        _legal("temperature", self.temperature, legal, "0 (greedy) or 1e-5..2")
        _legal("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0, at most 1")
        _legal("top_k", self.top_k, 0 <= self.top_k < 1 << 31, "0 (off) or a count")
        _legal("min_p", self.min_p, 0.0 <= self.min_p < 1.0, "at least 0, below 1")
        _legal("seed", self.seed, -(2**63) <= self.seed < 2**63, "a signed 64-bit integer")
        _legal("stop_tokens", self.stop_tokens, len(self.stop_tokens) <= 1024, "at most 1024 ids")
        _legal("min_tokens", self.min_tokens, 0 <= self.min_tokens <= self.max_tokens, f"0..{self.max_tokens}")
        self._check_penalties()
        _legal(
            "ignore_eos", self.ignore_eos, not (self.ignore_eos and self.grammar), "off with a grammar: it needs an end"
        )
        for key, best in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _legal(key, best, best is None or 0 <= best <= MOST_LOGPROBS, f"0..{MOST_LOGPROBS} or None")

    def _check_penalties(self) -> None:
        penalty = self.repetition_penalty
        _legal("repetition_penalty", penalty, 0.01 <= penalty <= 100.0, "0.01..100")
        for key, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            _legal(f"{key}_penalty", value, -2.0 <= value <= 2.0, "-2..2")
        for token, bias in self.logit_bias.items():
            _legal(f"logit_bias[{token}]", bias, -100.0 <= bias <= 100.0, "-100..100")

    def rule(self, prompt_length: int, stops: Iterable[int]) -> Rule:
        """The part of the parameters that decides a token, for a prompt of that length and ids that end the text."""
        early = self.min_tokens > 0
        return Rule(
            allowed=self.allowed_tokens,
            banned=self.banned_tokens,
            held=tuple(sorted(stops)) if early else (),
            held_until=prompt_length + self.min_tokens if early else 0,
            logit_bias=tuple(self.logit_bias.items()),
            **{name: getattr(self, name) for name in _ALIKE},
        )


def _legal(key: str, value: object, ok: bool, want: str) -> None:
    if not ok or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{key} = {value!r}: must be {want}")


class SeqRows(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The rows of one sequence in one forward: a prefill chunk, a single token, or a tree to verify.

    seq: the sequence; start: tokens of it whose KV is committed, so row i is stored at start + i and has position
    start + depth(i); tokens, parents [M]: as in Tree (a chunk is a chain); pick: the last `pick` rows get a token
    chosen (0: an inner prefill chunk, M: a tree); new_pages: appended to its page table before the forward; said:
    tokens emitted since its last forward, the root last, if its rule counts them; scored: at the first picked rows
    log-probabilities are of these ids, not of the chosen ones (the prompt's own, where they are wanted); masks: bit i
    of byte i // 8 says whether id i is allowed; mask_of: which of them each picked row has, if there are any.
    """

    seq: Count
    start: Count
    tokens: TokenIds
    parents: tuple[int, ...]
    pick: Count
    new_pages: tuple[Count, ...] = ()
    said: TokenIds = ()
    scored: TokenIds = ()
    masks: tuple[bytes, ...] = ()
    mask_of: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.parents) or self.pick > len(self.tokens):
            raise ValueError(f"{len(self.tokens)} tokens, {len(self.parents)} parents, pick {self.pick}")
        if len(self.scored) > self.pick:
            raise ValueError(f"{len(self.scored)} scored ids at {self.pick} picked rows")
        if self.masks and (len(self.mask_of) != self.pick or max(self.mask_of, default=0) >= len(self.masks)):
            raise ValueError(f"mask_of {self.mask_of}: {len(self.masks)} masks, {self.pick} picked rows")
        check_parents(self.parents)


class Logprob(Struct, frozen=True, array_like=True):
    """One id under the model's own distribution at a row: its log-probability and rank (1 is the best, ties by id),
    and the best ids with theirs, as many as were asked for."""

    token: int
    logprob: float
    rank: int
    best: tuple[tuple[int, float], ...]


class Move(Struct, frozen=True, forbid_unknown_fields=True):
    """Keep node rows[k] of `seq` as committed row start + k; rows are rising and rows[0] is the root, 0."""

    seq: Count
    start: Count
    rows: tuple[Count, ...]

    def __post_init__(self) -> None:
        if not self.rows or self.rows[0] != 0 or any(a >= b for a, b in zip(self.rows, self.rows[1:], strict=False)):
            raise ValueError(f"kept rows {self.rows}: must rise from 0")
