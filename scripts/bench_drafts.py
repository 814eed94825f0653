"""Stage times and speed of the engine with a network that drafts: trees grown on its device and on the host, by width.

    python scripts/bench_drafts.py [--device cuda --dtype bfloat16] [--model DIR --drafter DIR] [--seqs 1 8 32] [--json]

The ranks are loaded once. All ways then take turns around them, and continue the same pieces of held-out Python files
(kdtp.train.corpus), greedily; what counts are the rounds in which all sequences decode. Every text must be plain
decoding's. Medians over the turns, the first of which does not count.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp import draft, pair  # noqa: E402
from kdtp.bench.accept import prompts  # noqa: E402
from kdtp.config import DrafterConfig, EngineConfig  # noqa: E402
from kdtp.engine.assemble import local_link  # noqa: E402
from kdtp.engine.coordinator import Coordinator  # noqa: E402
from kdtp.engine.fleet import Fleet  # noqa: E402
from kdtp.engine.handshake import Handshake  # noqa: E402
from kdtp.engine.network import placed  # noqa: E402
from kdtp.engine.plan import Plan, plan  # noqa: E402
from kdtp.engine.request import STAGES, Request  # noqa: E402
from kdtp.messages import Tokens  # noqa: E402
from kdtp.text import tokenizer  # noqa: E402
from kdtp.train import corpus  # noqa: E402
from kdtp.types import SamplingParams  # noqa: E402
from scripts.measure import table  # noqa: E402

PROMPT = 64  # tokens
WAYS: Mapping[str, dict[str, Any]] = {
    "plain": {"budget": 0},
    "chain": {"shape": "chain"},
    "16, host": {"budget": 16, "trees": "host"},
    "16, device": {"budget": 16, "trees": "device"},
    "64, host": {"budget": 64, "trees": "host"},
    "64, device": {"budget": 64, "trees": "device"},
    "auto, host": {"budget": 64, "width": "auto", "trees": "host"},
    "auto, device": {"budget": 64, "width": "auto", "trees": "device"},
}


@dataclass
class Run:
    """Rounds in which all sequences decoded: how many, their seconds by stage and in all, and the tokens they gave."""

    rounds: int
    tokens: int
    seconds: float
    stages: dict[str, float]


class Ranks:
    """Loaded, and ready for one engine after the other."""

    def __init__(self, checked: Plan) -> None:
        self._plan = checked
        self._fleet = Fleet([local_link()], 1, 60.0)
        handshake = Handshake(self._fleet, checked.config, os.getpid())
        while not handshake.advance(0.1):
            pass

    def engine(self, way: str) -> Coordinator:
        """With fresh pages."""
        config = replace(self._plan.config, drafter=replace(self._plan.config.drafter, **WAYS[way]))
        on_gpu, vocab = config.device == "cuda", self._plan.model.vocab_size
        drafter = draft.make(config.drafter, {}, vocab, placed(config, self._fleet), on_gpu)
        made = Coordinator(config, self._plan.model, self._fleet, drafter)
        made.start()
        return made


def run(engine: Coordinator, texts: Sequence[Sequence[int]], tokens: int) -> tuple[Run, list[list[int]]]:
    """Continue all texts at once."""
    for i, prompt in enumerate(texts):
        engine.submit(Request(i, tuple(prompt), SamplingParams(max_tokens=tokens, ignore_eos=True)))
    found = Run(0, 0, 0.0, dict.fromkeys(STAGES[1:], 0.0))
    written: list[list[int]] = [[] for _ in texts]
    while not engine.idle:
        running = engine.scheduler.running
        whole = len(running) == len(texts) and not any(request.prefilling for request in running)
        before, began = dict(engine.seconds), time.perf_counter()
        messages = [event.message for event in engine.step()]
        took = time.perf_counter() - began
        given = [message for message in messages if isinstance(message, Tokens)]
        for message in given:
            written[message.request] += message.tokens
        if whole:
            found.rounds, found.seconds = found.rounds + 1, found.seconds + took
            found.tokens += sum(len(message.tokens) for message in given)
            for stage in found.stages:
                found.stages[stage] += engine.seconds[stage] - before[stage]
    return found, written


def measure(
    ranks: Ranks, ways: Sequence[str], texts: Sequence[Sequence[int]], tokens: int, turns: int
) -> Iterator[Any]:
    """The figures of each way with these texts at once. RuntimeError if a text is not plain decoding's."""
    runs: dict[str, list[Run]] = {way: [] for way in ways}
    plain = run(ranks.engine("plain"), texts, tokens)[1]
    for turn in range(turns + 1):
        for way in ways:
            found, written = run(ranks.engine(way), texts, tokens)
            if written != plain:
                raise RuntimeError(f"{way}, {len(texts)} sequences: a text is not plain decoding's")
            runs[way] += [found] if turn else []
        print(f"{len(texts)} sequences: turn {turn} of {turns}", file=sys.stderr, flush=True)
    for way, each in runs.items():
        yield {"seqs": len(texts), "way": way, **figures(each, len(texts))}


def figures(runs: Iterable[Run], seqs: int) -> dict[str, float]:
    """Medians: tokens of a sequence per round, tokens per second of all, milliseconds of a round and of its stages."""
    each = [
        {
            "tokens_per_round": run.tokens / run.rounds / seqs,
            "tokens_per_second": run.tokens / run.seconds,
            "round_ms": 1e3 * run.seconds / run.rounds,
            **{f"{stage}_ms": 1e3 * seconds / run.rounds for stage, seconds in run.stages.items()},
        }
        for run in runs
    ]
    return {name: round(median(figure[name] for figure in each), 4) for name in each[0]}


def show(points: Sequence[Mapping[str, Any]]) -> str:
    """As a table."""
    names = ("tokens_per_round", "tokens_per_second", "round_ms", *(f"{stage}_ms" for stage in STAGES[1:]))
    header = ("seqs", "way", *(name.removesuffix("_ms").replace("tokens_per_", "tok/") for name in names))
    rows = [(p["seqs"], p["way"], *(f"{p[name]:.{0 if p[name] > 100 else 3}f}" for name in names)) for p in points]
    return table(header, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Stage times and speed of the engine with a network that drafts.")
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--dtype", default="float32", help="float32 (default) or bfloat16")
    parser.add_argument("--model", default=pair.NAME, help="default: the pair that ships")
    parser.add_argument("--drafter", default=pair.NAME, help="folder of the drafter (default: the pair's)")
    parser.add_argument("--seqs", type=int, nargs="+", default=[1, 8, 32], metavar="N", help="at once (default 1 8 32)")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="of each text (default 96)")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="that count (default 3)")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS, metavar="WAY", help="default: all")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    chosen = parser.parse_args(arguments)
    most = max(chosen.seqs)
    drafter = DrafterConfig("dflash", model=chosen.drafter, budget=64)
    rows = most * (PROMPT + chosen.tokens + 2 * 64 + 64)
    config = EngineConfig(
        chosen.model, device=chosen.device, dtype=chosen.dtype, drafter=drafter, max_batch=most, kv_tokens=rows
    )
    checked = plan(config)
    codec = tokenizer.load(checked.config.model)
    texts = [ids for _, ids in prompts(corpus.read(None).held_out, codec, most, PROMPT, 0)]
    ranks, points = Ranks(checked), []
    for seqs in chosen.seqs:
        points += measure(ranks, chosen.ways, texts[:seqs], chosen.tokens, chosen.turns)
    print(json.dumps(points) if chosen.json else show(points))


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"bench_drafts: {error}")
