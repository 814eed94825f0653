"""What kdtp's processes say to each other: coordinator and workers, clients and coordinator.

Every message is decoded from MessagePack by type (msgspec): unknown fields, wrong types and broken invariants are
refused by the decoder, so a message that was received is known to be well formed.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from kdtp.drafting import Draft, Drafts, Keep
from kdtp.types import NO_TOKEN, Count, Logprob, Move, Rule, SamplingParams, SeqRows, Token
from kdtp.watch import MOST_ROUNDS, Round, Watch

PROTOCOL_VERSION = 5

Pid: TypeAlias = Annotated[int, Meta(ge=1, lt=2**31)]
Text: TypeAlias = Annotated[str, Meta(max_length=1 << 16)]

# ---------------------------------------------------------------- coordinator -> worker


class Begin(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A sequence that has its first forward, or the first since it was released: what holds for all its rows.

    prompt, said: its prompt and the tokens emitted so far, the root last, if its rule counts them; logprobs: how many
    of the best ids are wanted beside each picked one, -1: no log-probabilities.
    """

    seq: Count
    prompt_length: Count
    rule: Rule
    prompt: tuple[Token, ...] = ()
    said: tuple[Token, ...] = ()
    logprobs: int = -1


class Forward(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """Run one ragged batch and choose the tokens. Answered by Ids (or Fault) with the same epoch and step.

    Without sequences it is a ping: answered, nothing run.
    """

    epoch: Count
    step: Count
    seqs: tuple[SeqRows, ...]
    begun: tuple[Begin, ...] = ()
    want_logits: bool = False  # also send the picked rows' logits (used by --check)


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


ToWorker = Welcome | Forward | Keep | Commit | Draft | Shutdown

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
    """Tokens chosen by one forward: for each of its SeqRows in order, `pick` ids (NO_TOKEN where none can be chosen).

    Every rank sends the same ids, so that the coordinator sees ranks that have parted; likewise `made`, the checksum of
    the collectives that a rank has made.

    Only from rank 0 and only if asked: logprobs of the picked rows of the sequences that want them, in order; shape:
    (R, V) of the float32 logits in the frame after this message. features: where it has left what a network at the
    coordinator reads, as engine.features names it.
    """

    epoch: Count
    step: Count
    rank: Count
    ids: tuple[Annotated[int, Meta(ge=NO_TOKEN, lt=2**31)], ...]
    logprobs: tuple[Logprob, ...] = ()
    shape: tuple[Count, Count] | None = None
    made: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    features: Count | None = None


class Fault(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """This rank cannot go on."""

    epoch: Count
    step: Count
    rank: Count
    text: Text


FromWorker = Hello | Progress | Ready | Ids | Drafts | Fault

# ---------------------------------------------------------------- client <-> coordinator (RPC)


class Submit(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Start a request. `request` is the client's own label, unique among its open ones.

    budget: tree nodes below the root, at most the engine's; priority: higher ones run first; salt: only requests of one
    salt share pages of a prefix. None of them changes the text. given: what it emitted before, in an engine that ended:
    it goes on behind that, exactly as it would have, and its first Tokens have the position len(given). watch: as of
    Watch, from its first round on.
    """

    request: Count
    prompt: Annotated[tuple[Token, ...], Meta(min_length=1, max_length=1 << 24)]
    params: SamplingParams
    speculate: bool = True  # False: plain decoding, whatever the engine's drafter (the reference for --check)
    want_logits: bool = False
    budget: Count | None = None
    priority: Annotated[int, Meta(ge=-(2**31), lt=2**31)] = 0
    salt: Text = ""
    given: tuple[Token, ...] = ()
    watch: Annotated[int, Meta(ge=0, le=MOST_ROUNDS)] = 0


class Cancel(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Stop a request; it ends with Finished, reason "cancelled". An unknown label is counted and ignored."""

    request: Count


class StatusQuery(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Ask for Status. upto: the newest label of this client, which the answer repeats; usages: also costs so far."""

    upto: Count = 0
    usages: bool = False


class ShutdownQuery(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """End the engine: open requests fail with code "shutdown"."""


ToEngine = Submit | Cancel | Watch | StatusQuery | ShutdownQuery


class Usage(Struct, frozen=True, forbid_unknown_fields=True):
    """What one request cost. Tokens are counted as emitted, after every cut.

    cached_tokens: of the prompt's, found in the prefix cache when it was admitted; queued_ms: until then; preemptions:
    how often it lost its rows and ran its text again; rounds: verify forwards; forwards: those and the prefill chunks;
    committed: the sum over rounds of the rows that were kept, root included, and whose token was emitted;
    drafted_by_depth / accepted_by_depth: rounds in which a node of depth d + 1 was offered / accepted; timings_ms: by
    stage, whole rounds this request took part in.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    preemptions: int = 0
    rounds: int = 0
    forwards: int = 0
    committed: int = 0
    drafted_by_depth: tuple[int, ...] = ()
    accepted_by_depth: tuple[int, ...] = ()
    timings_ms: dict[str, float] = {}
    queued_ms: float = 0.0


class Tokens(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Newly emitted tokens; `position` is the index of the first among the request's emitted tokens. logprobs: one for
    each token, if asked for."""

    request: Count
    position: Count
    tokens: tuple[Token, ...]
    logprobs: tuple[Logprob, ...] = ()
    shape: tuple[Count, Count] | None = None  # (len(tokens), V) of the float32 logits in the next frame, if asked


class Scored(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Log-probabilities of prompt tokens, the first of index `position` (at least 1: nothing precedes the first)."""

    request: Count
    position: Count
    logprobs: tuple[Logprob, ...]


class Finished(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The request's terminal event. reason: "stop", "length" or "cancelled"."""

    request: Count
    reason: Text
    usage: Usage


class Failed(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The request's terminal event when it could not be served.

    code: "invalid" (the request, also when its rules leave no token after some), "no_token" (its logits hold NaN),
    "shutdown", or "engine" (a rank died, hung or diverged). request: None if the message had no readable label.
    """

    request: Count | None
    code: Text
    message: Text


class Refused(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """The request's terminal event when too much waits already: nothing was done, and it may be sent again.

    reason: which limit, and how much waits; retry_after: seconds until there may be room, an estimate.
    """

    request: Count
    reason: Text
    retry_after: float


class Status(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """A picture of the engine. state: "loading" or "ready".

    waiting_tokens: of the requests that wait; pages_free: that can be taken now, pages_idle: those of them that are
    kept for what they hold; counters: since the start. upto: of the query; open: this client's open requests. A label
    up to `upto` that is not open has had its terminal event, or the event was lost because this client did not read.
    usages: of those that have run, if asked for; stage_ms: of all steps; accepted: rounds in which 0, 1, 2 … draft
    tokens were; tallies: how often each "tree_nodes", "tree_depth" and "step_rows" came; step_ages: seconds since each
    rank answered; patience: of silence that may come. Unasked: before a longer one, and as last words, with a fault.
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
    waiting_tokens: Count
    pages_free: Count
    pages_idle: Count
    load_done: Count
    load_total: Count
    worker_pids: tuple[Pid, ...]
    counters: dict[str, int]
    model: Text
    vocab_size: Count
    max_positions: Count
    usages: dict[Count, Usage] = {}
    stage_ms: dict[str, float] = {}
    accepted: tuple[Count, ...] = ()
    tallies: dict[str, dict[Count, Count]] = {}
    step_ages: tuple[float, ...] = ()
    patience: float = 60.0
    fault: Text = ""


Terminal = Finished | Failed | Refused
FromEngine = Tokens | Scored | Round | Terminal | Status
