"""What a request costs at growing contexts: prefill, and each stage of a round behind it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from kdtp.engine.api import Engine
from kdtp.messages import Finished, Usage
from kdtp.types import SamplingParams

_SHORT = 16  # tokens


@dataclass(frozen=True)
class Point:
    """One length of context, in tokens, and what the tokens behind it cost."""

    length: int
    usage: Usage

    def figures(self) -> dict[str, Any]:
        """Tokens per second of prefill and of decoding, tokens per round, milliseconds of a round by stage."""
        usage = self.usage
        rounds = max(usage.rounds, 1)
        stages = {stage: ms for stage, ms in usage.timings_ms.items() if stage != "prefill"}
        prefill, decode = usage.timings_ms.get("prefill", 0.0), sum(stages.values())
        return {
            "context": self.length,
            "prefill_tokens_per_second": _rate(self.length, prefill),
            "tokens_per_second": _rate(usage.completion_tokens - 1, decode),
            "tokens_per_round": round(usage.committed / rounds, 4),
            "acceptance_by_depth": [
                round(a / d, 4) for a, d in zip(usage.accepted_by_depth, usage.drafted_by_depth, strict=True)
            ],
            "round_ms": {stage: round(ms / rounds, 4) for stage, ms in stages.items()},
        }


def _rate(count: int, milliseconds: float) -> float:
    return round(1e3 * count / milliseconds, 3) if milliseconds else 0.0


def prompts(lengths: Sequence[int], vocab_size: int, text: Sequence[int], seed: int) -> list[list[int]]:
    """A prompt of each length: the text's tokens, repeated where it is too short, or else random ids."""
    chance = random.Random(seed)
    if text:
        return [[text[i % len(text)] for i in range(length)] for length in lengths]
    return [[chance.randrange(vocab_size) for _ in range(length)] for length in lengths]


def measure(
    engine: Engine,
    asked: Sequence[Sequence[int]],
    params: SamplingParams,
    speculate: bool,
    tell: Callable[[Point], object],
) -> list[Point]:
    """Run each prompt alone; tell: called with each point as it comes.

    A short run comes before: what a length needs for the first time, such as CUDA graphs, is made in that.
    """
    short = replace(params, max_tokens=min(_SHORT, params.max_tokens))
    points = []
    for prompt in asked:
        _run(engine, prompt, short, speculate)
        points.append(Point(len(prompt), _run(engine, prompt, params, speculate)))
        tell(points[-1])
    return points


def _run(engine: Engine, prompt: Sequence[int], params: SamplingParams, speculate: bool) -> Usage:
    usage = Usage()
    for event in engine.stream(prompt, params, speculate):
        if isinstance(event, Finished):
            usage = event.usage
    return usage
