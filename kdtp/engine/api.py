"""The Python API: `Engine` runs a model in this process (tp=1) or drives a group of processes (tp>1)."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kdtp.config import DrafterConfig, EngineConfig
from kdtp.engine import rundir
from kdtp.engine.plan import Plan, plan
from kdtp.engine.rpc import Client, EngineBusy, EngineDead, Labelled, Reply
from kdtp.engine.scheduler import QueueFull, Request
from kdtp.types import Failed, Finished, FromEngine, SamplingParams, Tokens, Usage

if TYPE_CHECKING:
    from kdtp.engine.coordinator import Coordinator

OnProgress = Callable[[int, int], None]
_END_TIMEOUT = 5.0  # seconds for a group of processes to end; its own bounds are tighter


@dataclass(frozen=True)
class Completion:
    """One finished request: emitted token ids, why it ended ("stop", "length"), its cost, logits [T, V] if asked."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reason: str
    usage: Usage
    logits: NDArray[np.float32] | None = None


class _Backend(Protocol):
    def submit(self, prompt: Sequence[int], params: SamplingParams, speculate: bool, want_logits: bool) -> int: ...
    def wait(self, requests: Iterable[int]) -> list[Labelled]: ...
    def cancel(self, request: int) -> None: ...
    def close(self) -> None: ...


class Engine:
    """Generate with one model. Use as a context manager, or call `close`.

    model: a KDTR model file; tp: ranks, each a process of its own if more than one; drafter: a name (its settings then
    are `block` and `budget`) or a DrafterConfig; on_progress: called with bytes loaded and to load. Other settings:
    `Engine.of(EngineConfig(...))`. Raises ValueError for what cannot be, EngineBusy when the
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
        self._backend: _Backend = _InProcess(self.plan, tell) if config.tp == 1 else _Group(self.plan, tell)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        speculate: bool = True,
        want_logits: bool = False,
        on_tokens: Callable[[int, Tokens], None] | None = None,
    ) -> list[Completion]:
        """Complete each prompt of token ids, all at once; results in the order of `prompts`.

        speculate=False decodes plainly whatever the drafter: the tokens are the same. on_tokens: called as tokens
        are decided, with the prompt's index.
        """
        each = params if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompts)
        if len(each) != len(prompts):
            raise ValueError(f"params: {len(each)} for {len(prompts)} prompts")
        work = iter(zip(range(len(prompts)), prompts, each, strict=True))
        got: list[list[Reply]] = [[] for _ in prompts]
        open_ones: dict[int, int] = {}  # label -> index of its prompt
        try:
            while True:
                # No more at once than the engine takes without refusing.
                for index, prompt, p in itertools.islice(work, max(0, self.config.max_queue - len(open_ones))):
                    open_ones[self._backend.submit(prompt, p, speculate, want_logits)] = index
                if not open_ones:
                    return [_completion(prompt, replies) for prompt, replies in zip(prompts, got, strict=True)]
                for label, message, frame in self._backend.wait(open_ones):
                    index = open_ones[label]
                    if isinstance(message, Finished | Failed):
                        del open_ones[label]
                    _raise_if_failed(message)
                    got[index].append((message, frame))
                    if on_tokens and isinstance(message, Tokens):
                        on_tokens(index, message)
        except BaseException:
            for label in open_ones:
                self._backend.cancel(label)
            raise

    def stream(
        self, prompt: Sequence[int], params: SamplingParams | None = None, speculate: bool = True
    ) -> Iterator[Tokens | Finished]:
        """Complete one prompt: Tokens as they are decided (several at once), then Finished. Leaving early cancels."""
        label = self._backend.submit(prompt, params or SamplingParams(), speculate, False)
        finished = False
        try:
            while not finished:
                for _, message, _ in self._backend.wait([label]):
                    finished = not isinstance(message, Tokens)
                    _raise_if_failed(message)
                    assert isinstance(message, Tokens | Finished)
                    yield message
        finally:
            if not finished:
                self._backend.cancel(label)

    def close(self) -> None:
        """End the engine and all its processes."""
        backend, self._backend = self._backend, _Closed()
        backend.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _raise_if_failed(message: FromEngine) -> None:
    if isinstance(message, Failed):
        kind = {"invalid": ValueError, "capacity": EngineBusy}.get(message.code, EngineDead)
        raise kind(message.message)


def _completion(prompt: Sequence[int], replies: Sequence[Reply]) -> Completion:
    tokens: list[int] = []
    rows: list[NDArray[np.float32]] = []
    for message, frame in replies:
        if isinstance(message, Tokens):
            tokens += message.tokens
            if frame is not None and message.shape is not None:
                rows.append(np.frombuffer(frame, np.float32).reshape(message.shape))
    last = replies[-1][0]
    assert isinstance(last, Finished)
    return Completion(tuple(prompt), tuple(tokens), last.reason, last.usage, np.concatenate(rows) if rows else None)


class _Closed:
    """What is behind an Engine after `close`."""

    def submit(self, prompt: Sequence[int], params: SamplingParams, speculate: bool, want_logits: bool) -> int:
        raise ValueError("the engine is closed")

    def wait(self, requests: Iterable[int]) -> list[Labelled]:
        raise ValueError("the engine is closed")

    def cancel(self, request: int) -> None: ...

    def close(self) -> None: ...


class _InProcess:
    """The coordinator and its only rank, in this process and thread: a round runs when somebody waits for events."""

    def __init__(self, plan: Plan, tell: OnProgress) -> None:
        from kdtp.engine.assemble import assemble, local_link  # torch, only needed here

        self._coordinator: Coordinator
        self._coordinator, handshake = assemble(plan, [local_link()])
        while not handshake.advance(0.1):
            tell(*handshake.loaded)
        tell(*handshake.loaded)
        self._events: dict[int, deque[Reply]] = {}
        self._opened = 0

    def submit(self, prompt: Sequence[int], params: SamplingParams, speculate: bool, want_logits: bool) -> int:
        self._opened += 1
        try:
            self._coordinator.submit(Request(self._opened, tuple(prompt), params, speculate, want_logits))
        except QueueFull as error:
            raise EngineBusy(str(error)) from None
        self._events[self._opened] = deque()
        return self._opened

    def wait(self, requests: Iterable[int]) -> list[Labelled]:
        while True:
            got = [(r, *reply) for r in sorted(requests) for reply in self._take(r)]
            if got:
                return got
            for event in self._coordinator.step():
                assert event.message.request is not None
                self._events[event.message.request].append((event.message, event.logits))

    def _take(self, request: int) -> list[Reply]:
        replies = list(self._events[request])
        self._events[request].clear()
        if replies and not isinstance(replies[-1][0], Tokens):
            del self._events[request]
        return replies

    def cancel(self, request: int) -> None:
        self._events.pop(request, None)
        self._coordinator.cancel(request)

    def close(self) -> None:
        self._coordinator.fleet.close()


class _Group:
    """A `kdtp engine` process of our own with its coordinator and workers. It ends when our end of its stdin closes."""

    def __init__(self, plan: Plan, tell: OnProgress) -> None:
        self._folder = rundir.create()
        settings = self._folder / rundir.SETTINGS
        settings.write_text(json.dumps(plan.config.mapping()))
        command = [sys.executable, "-m", "kdtp", "engine", "--config", str(settings), "--run-dir", str(self._folder)]
        self._process = subprocess.Popen(
            [*command, "--end-with-stdin", "--log-level", "warning"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._client = Client(rundir.endpoint(self._folder, "rpc"), self._alive)
        try:
            self._wait_until_ready(plan.config.load_timeout, tell)
        except BaseException:
            self.close()
            raise

    def _wait_until_ready(self, seconds: float, tell: OnProgress) -> None:
        deadline = time.monotonic() + seconds
        state = "loading"
        while state == "loading":
            status = self._client.status(max(0.0, deadline - time.monotonic()))
            tell(status.load_done, status.load_total)
            state = status.state
            time.sleep(0.05)

    def _alive(self) -> None:
        code = self._process.poll()
        if code is not None:
            raise EngineDead(f"the engine's processes ended with code {code}; its log says why")

    def submit(self, prompt: Sequence[int], params: SamplingParams, speculate: bool, want_logits: bool) -> int:
        return self._client.submit(prompt, params, speculate, want_logits)

    def wait(self, requests: Iterable[int]) -> list[Labelled]:
        return self._client.wait(requests)

    def cancel(self, request: int) -> None:
        self._client.cancel(request)
        self._client.forget(request)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_TIMEOUT)
        self._client.close()
        rundir.remove(self._folder)


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
