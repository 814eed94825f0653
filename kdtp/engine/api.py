"""The Python API: `Engine` runs a model in this process (tp=1) or drives a group of processes (tp>1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdtp.config import DrafterConfig, EngineConfig
from kdtp.engine.backends import Backend, Closed, Group, InProcess, OnProgress
from kdtp.engine.plan import Plan, plan
from kdtp.engine.rpc import EngineBusy, EngineDead, Reply
from kdtp.messages import Failed, Finished, FromEngine, Refused, Scored, Terminal, Tokens, Usage
from kdtp.types import Logprob, SamplingParams
from kdtp.watch import MOST_ROUNDS, Round


@dataclass(frozen=True)
class Completion:
    """One finished request: emitted token ids, why it ended ("stop", "length"), its cost, and what was asked for.

    logits [T, V]; logprobs: one for each emitted token; prompt_logprobs: one for each prompt token but the first.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reason: str
    usage: Usage
    logits: NDArray[np.float32] | None = None
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[Logprob, ...] = ()


class Engine:
    """Generate with one model. Use as a context manager, or call `close`.

    model: a KDTR model file or a published folder; tp: ranks, each a process of its own if more than one; drafter: a
    name (its settings then are `block` and `budget`) or a DrafterConfig; on_progress: called with bytes loaded and to
    load. Other settings: `Engine.of(EngineConfig(...))`. Raises ValueError for what cannot be, EngineBusy when the
    queue is full of others' requests, EngineDead when the processes fail.
    """

    def __init__(
        self,
        model: str,
        tp: int = 1,
        device: str = "cpu",
        dtype: str = "float32",
        drafter: str | DrafterConfig = "none",
        block: int = 8,
        budget: int = 16,
        on_progress: OnProgress | None = None,
    ) -> None:
        if isinstance(drafter, str):
            drafter = DrafterConfig(drafter, block, budget)
        self._open(EngineConfig(model, tp=tp, device=device, dtype=dtype, drafter=drafter), on_progress)

    @classmethod
    def of(cls, config: EngineConfig, on_progress: OnProgress | None = None) -> Engine:
        """An engine of a complete configuration."""
        self = cls.__new__(cls)
        self._open(config, on_progress)
        return self

    def _open(self, config: EngineConfig, on_progress: OnProgress | None) -> None:
        self.plan: Plan = plan(config)
        self.config = self.plan.config
        tell = on_progress or (lambda done, total: None)
        self._backend: Backend = InProcess(self.plan, tell) if config.tp == 1 else Group(self.plan, tell)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculate: bool = True,
        want_logits: bool = False,
        on_tokens: Callable[[int, Tokens], object] | None = None,
        on_round: Callable[[int, Round], object] | None = None,
    ) -> list[Completion]:
        """Complete each prompt of token ids, all at once; results in the order of `prompts`.

        speculate=False decodes plainly whatever the drafter: the tokens are the same. on_tokens: called as tokens
        are decided, with the prompt's index; once it returns True, that request ends with finish_reason "cancelled".
        on_round: called with the trees that were verified, each before its tokens.
        """
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"params: {len(each)} for {len(prompts)} prompts")
        got: list[list[Reply]] = [[] for _ in prompts]
        open_ones: dict[int, int] = {}  # label -> index of its prompt
        sent, rounds = 0, MOST_ROUNDS if on_round else 0
        try:
            while True:
                for index in self._room(prompts, sent, open_ones.values()):
                    label = self._backend.submit(prompts[index], each[index], speculate, want_logits, rounds)
                    open_ones[label], sent = index, index + 1
                if not open_ones:
                    return [_completion(prompt, replies) for prompt, replies in zip(prompts, got, strict=True)]
                for label, message, frame in self._backend.wait(open_ones):
                    index = open_ones[label]
                    if isinstance(message, Terminal):
                        del open_ones[label]
                    _raise_if_failed(message)
                    if isinstance(message, Round):
                        if on_round:
                            on_round(index, message)
                            self._backend.watch(label, rounds)
                        continue
                    got[index].append((message, frame))
                    if on_tokens and isinstance(message, Tokens) and on_tokens(index, message) is True:
                        self._backend.cancel(label)
        except BaseException:
            for label in open_ones:
                self._backend.forget(label)
            raise

    def _room(self, prompts: Sequence[Sequence[int]], sent: int, open_ones: Iterable[int]) -> range:
        """The next prompts behind `sent`, as many as the engine takes without refusing while others are open."""
        lengths = [len(prompts[i]) for i in open_ones]
        last = sent
        while last < len(prompts) and len(lengths) < self.config.max_queue:
            lengths.append(len(prompts[last]))
            if len(lengths) > 1 and sum(lengths) > self.config.max_queue_tokens:
                break
            last += 1
        return range(sent, last)

    def stream(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        speculate: bool = True,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> Iterator[Tokens | Scored | Finished]:
        """Complete one prompt: Tokens as they are decided (several at once), then Finished. Leaving early cancels.

        Scored: the prompt's log-probabilities, if asked for, part by part before the first Tokens.
        cancelled: asked between steps, so that a signal handler can end the request; once it is true the request
        ends, and Finished has the reason "cancelled".
        """
        label = self._backend.submit(prompt, params or SamplingParams(), speculate, False, 0)
        asked = finished = False
        try:
            while not finished:
                if cancelled() and not asked:
                    asked = True
                    self._backend.cancel(label)
                for _, message, _ in self._backend.wait([label]):
                    finished = not isinstance(message, Tokens | Scored)
                    _raise_if_failed(message)
                    assert isinstance(message, Tokens | Scored | Finished)
                    yield message
        finally:
            if not finished:
                self._backend.forget(label)

    def close(self) -> None:
        """End the engine and all its processes."""
        backend, self._backend = self._backend, Closed()
        backend.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _raise_if_failed(message: FromEngine) -> None:
    if isinstance(message, Refused):
        raise EngineBusy(message.reason, message.retry_after)
    if isinstance(message, Failed):
        raise (ValueError if message.code == "invalid" else EngineDead)(message.message)


def _completion(prompt: Sequence[int], replies: Sequence[Reply]) -> Completion:
    tokens: list[int] = []
    logprobs: dict[type, list[Logprob]] = {Tokens: [], Scored: []}
    rows: list[NDArray[np.float32]] = []
    for message, frame in replies:
        if isinstance(message, Tokens | Scored):
            logprobs[type(message)] += message.logprobs
        if isinstance(message, Tokens):
            tokens += message.tokens
            if frame is not None and message.shape is not None:
                rows.append(np.frombuffer(frame, np.float32).reshape(message.shape))
    last = replies[-1][0]
    assert isinstance(last, Finished)
    logits = np.concatenate(rows) if rows else None
    told, scored = tuple(logprobs[Tokens]), tuple(logprobs[Scored])
    return Completion(tuple(prompt), tuple(tokens), last.reason, last.usage, logits, told, scored)


def describe(completion: Completion) -> dict[str, Any]:
    """The figures of a completion, under the names of `kdtp generate --json`."""
    usage = completion.usage
    return {
        "prompt": list(completion.prompt),
        "tokens": list(completion.tokens),
        "finish_reason": completion.finish_reason,
        "rounds": usage.rounds,
        "forwards": usage.forwards,
        "tokens_per_round": usage.committed / usage.rounds if usage.rounds else 0.0,
        "drafted_by_depth": list(usage.drafted_by_depth),
        "accepted_by_depth": list(usage.accepted_by_depth),
        "timings_ms": usage.timings_ms,
    }
