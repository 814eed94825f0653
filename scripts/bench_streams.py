"""Speculation by streams: plain decoding, chains, trees and `--width auto` on the same texts, and their time by stage.

    python scripts/bench_streams.py [--streams 1,8,32] [--budgets 4,8,16] [--answers 24] [--ways plain,auto]
    python scripts/bench_streams.py --device cuda --dtype bfloat16 --answers 64 --warm 200

An engine for each way, all in this process, without prefix cache. Held-out modules are continued, greedily and by
`--tokens` each, and whenever a text is done the next one begins, so that there are always so many. The ways take turns
of `--slice` seconds until each has written `--answers` texts, and as many more for every 8 streams: what else the
machine does disturbs all alike. The first `--warm` tokens of each stream are not counted: `auto` learns in them, and
graphs are captured. On a CPU all times, also those that `auto` learns from, are of this process's processor time, on a
GPU of the clock.

First table: `of best` is against the best of the others; `plain` the share of rounds without a tree; then milliseconds
per round, by stage; `else` is what is done around the stages. Second table, of a second engine with `auto`, one that
counts, which takes time, to see why it loses if it does: share of rounds with a draft; number of trials (drafts while
drafting does not pay), and the share of time of the rounds they were in; mean milliseconds of rounds without trees, of
those with, and of drafts (building included), each with what was expected over what it took; draft tokens hoped for
over those accepted; milliseconds per round in the policy's own Python; graphs captured while counting.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp.bench.accept import prompts  # noqa: E402
from kdtp.cli.answer import find_tokenizer  # noqa: E402
from kdtp.config import DEVICES, DTYPES, DrafterConfig, EngineConfig  # noqa: E402
from kdtp.engine import coordinator  # noqa: E402
from kdtp.engine import widths as engine_widths  # noqa: E402
from kdtp.engine.assemble import assemble, local_link  # noqa: E402
from kdtp.engine.plan import plan  # noqa: E402
from kdtp.engine.request import STAGES, Request  # noqa: E402
from kdtp.engine.worker import Worker  # noqa: E402
from kdtp.messages import Terminal, Tokens  # noqa: E402
from kdtp.proposals import Grown  # noqa: E402
from kdtp.spec.width import Policy  # noqa: E402
from kdtp.train import corpus  # noqa: E402
from kdtp.types import SamplingParams  # noqa: E402
from scripts.measure import machine, table  # noqa: E402

COUNTED = "auto counting"
KINDS = ("plain", "wide", "draft")  # what a policy expects something of: rounds without trees and with, and drafts
HEADS = ("tokens/s", "of best", "tokens/round", "nodes", "plain", "ms/round", *STAGES[1:], "else")
WHY = (COUNTED, "drafted", "trials", "of time", *(f"{kind}, ms" for kind in KINDS), "hoped", "own ms", "captured")
T = TypeVar("T")


class Told(Policy):
    """A policy that keeps count of what it expected and what came: seconds or rounds, by figure."""

    def __init__(self, policy: Policy, clock: Callable[[], float]) -> None:
        super().__init__(policy.rounds, policy.drafting)
        self.sums: Counter[object] = Counter()
        self._clock = clock

    def _timed(self, call: Callable[..., T], *values: Any) -> T:
        began = self._clock()
        found = call(*values)
        self.sums["own"] += self._clock() - began
        return found

    def _note(self, kind: str, expected: float, took: float) -> None:
        self.sums.update({kind: 1, (kind, "expected"): expected, (kind, "took"): took})
        if self.tries:
            self.sums["tried"] += took

    def drafts(self, asking: int) -> int:
        """As Policy."""
        asked = self._timed(super().drafts, asking)
        self.sums["trials"] += self.tries
        return asked

    def choose(self, *values: Any) -> list[int]:
        """As Policy."""
        return self._timed(super().choose, *values)

    def learn_draft(self, asked: int, context: int, seconds: float, accepted: int) -> None:
        """As Policy."""
        self._note("draft", self.drafting.seconds(asked, asked, context), seconds)
        self._timed(super().learn_draft, asked, context, seconds, accepted)

    def learn(self, seqs: int, rows: int, context: int, seconds: float) -> None:
        """As Policy."""
        self._note("wide" if rows > seqs else "plain", self.rounds.seconds(seqs, rows, context), seconds)
        self._timed(super().learn, seqs, rows, context, seconds)

    def learn_tree(self, grown: Grown, accepted: Collection[int]) -> None:
        """As Policy."""
        worth = self.calibration.worth(grown.scores[1:])
        self.sums.update({"hoped": sum(worth), "accepted": len(accepted) - 1})
        self._timed(super().learn_tree, grown, accepted)

    def line(self, rounds: int, wall: float) -> list[object]:
        """Of the second table."""
        sums, each = self.sums, []
        for kind in KINDS:
            took, count = sums[kind, "took"], sums[kind]
            each.append(f"{1e3 * took / count:.2f} x {sums[kind, 'expected'] / took:.2f}" if count else "-")
        shares = f"{sums['draft'] / rounds:.1%}", sums["trials"], f"{sums['tried'] / wall:.1%}"
        hoped = f"{sums['hoped'] / sums['accepted']:.2f}" if sums["accepted"] else "-"
        return ["", *shares, *each, hoped, f"{1e3 * sums['own'] / rounds:.3f}"]


class Load:
    """An engine that always has so many texts to continue, by `tokens` each, and what it has done since `forget`."""

    def __init__(
        self,
        config: EngineConfig,
        texts: Sequence[Sequence[int]],
        tokens: int,
        clock: Callable[[], float],
        counts: bool = False,
    ) -> None:
        link = local_link()
        self._worker: Worker = link.handle.__self__  # type: ignore[attr-defined]
        self._coordinator, handshake = assemble(plan(config), [link])
        while not handshake.advance(1.0):
            pass
        self.told = None
        if counts and self._coordinator.widths is not None:
            self._coordinator.widths.policy = self.told = Told(self._coordinator.widths.policy, clock)
        self._texts, self._tokens, self._clock = texts, tokens, clock
        self._ids = itertools.count(1)
        self.forget()

    def begin(self, streams: int) -> None:
        """Open so many, of which the first ends soon and the last late, as if it had been so for long."""
        self._next = itertools.cycle(self._texts)  # from the first on: all ways have the same
        for i in range(streams):
            self._submit(max(1, self._tokens * (i + 1) // streams))

    def _submit(self, tokens: int) -> None:
        params = SamplingParams(tokens, ignore_eos=True)
        self._coordinator.submit(Request(next(self._ids), tuple(next(self._next)), params))

    def run(self, tokens: int, seconds: float = math.inf) -> bool:
        """Rounds until so many tokens have come since `forget`, or for so long; whether they have come."""
        made, sums = self._coordinator, self.sums
        made._ended = None  # the others' turns are no part of a round
        began = self._clock()
        while sums["tokens"] < tokens and self._clock() < began + seconds:
            before = made.counters["drafted"]
            for event in made.step():
                if isinstance(event.message, Tokens):
                    sums["tokens"] += len(event.message.tokens)
                elif isinstance(event.message, Terminal):
                    self._submit(self._tokens)
            nodes = made.counters["drafted"] - before
            sums.update(rounds=1, nodes=nodes, plain=not nodes)
        sums["wall"] += self._clock() - began
        return sums["tokens"] >= tokens

    def forget(self) -> None:
        """Count anew."""
        self.sums: Counter[str] = Counter()
        self._seconds = dict(self._coordinator.seconds)
        self._captured = self._worker.shard.graphs
        if self.told is not None:
            self.told.sums.clear()

    def end(self) -> None:
        """Cancel what is open."""
        scheduler = self._coordinator.scheduler
        for request in [*scheduler.running, *scheduler.waiting]:
            self._coordinator.cancel(request.id)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.sums["tokens"] / self.sums["wall"]

    def line(self, best: float) -> list[object]:
        """Of the first table; best: the best rate of the ways that it is compared with."""
        sums, rounds = self.sums, self.sums["rounds"]
        stages = [1e3 * (s - self._seconds[name]) / rounds for name, s in self._coordinator.seconds.items()]
        each = 1e3 * sums["wall"] / rounds
        means = [f"{sums['tokens'] / rounds:.2f}", f"{sums['nodes'] / rounds:.2f}", f"{sums['plain'] / rounds:.0%}"]
        return [
            self.rate,
            f"{self.rate / best:.2f}",
            *means,
            *(f"{ms:.2f}" for ms in (each, *stages, each - sum(stages))),
        ]

    def why(self) -> list[object]:
        """Of the second table."""
        assert self.told is not None, "nothing was counted"
        captured = self._worker.shard.graphs - self._captured
        return [*self.told.line(self.sums["rounds"], self.sums["wall"]), captured]


def ways(chosen: argparse.Namespace) -> dict[str, DrafterConfig]:
    """All that there are, by name."""
    config = DrafterConfig("dflash", model=chosen.drafter_model, budget=chosen.most)
    found = {"plain": DrafterConfig(), "chain": replace(config, shape="chain", budget=config.block - 1)}
    found |= {f"tree of {nodes}": replace(config, budget=nodes) for nodes in map(int, chosen.budgets.split(","))}
    found["auto"] = found[COUNTED] = replace(config, width="auto")
    return found


def texts(chosen: argparse.Namespace) -> list[list[int]]:
    """Stretches of held-out modules."""
    checked = plan(EngineConfig(chosen.model))
    tokenizer = find_tokenizer(checked.config, checked.model.vocab_size, needed=True)
    assert tokenizer is not None
    return [ids for _, ids in prompts(corpus.read(None).held_out, tokenizer, chosen.prompts, chosen.prompt_tokens, 0)]


def compare(loads: Mapping[str, Load], streams: int, chosen: argparse.Namespace) -> None:
    """Run so many streams each way, and print what came of it."""
    for load in loads.values():
        load.begin(streams)
        load.run(streams * chosen.warm)
        load.forget()
    left, tokens = list(loads.values()), chosen.answers * (1 + streams // 8) * chosen.tokens
    while left:
        left = [load for load in left if not load.run(tokens, chosen.slice)]
    others = [load.rate for name, load in loads.items() if not name.startswith("auto")]
    best = max(others or [load.rate for load in loads.values()])
    print(f"\n{table((f'{streams} streams', *HEADS), [(name, *load.line(best)) for name, load in loads.items()])}")
    if COUNTED in loads:
        print(table(WHY, [loads[COUNTED].why()]), flush=True)
    for load in loads.values():
        load.end()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="pair", help="a folder, or the model that ships (default: pair)")
    parser.add_argument("--drafter-model", default="pair", metavar="DIR", help="of its drafter (default: pair)")
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="(default cpu)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default float32)")
    parser.add_argument("--streams", default="1,8,32", help="texts at once (default 1,8,32)")
    parser.add_argument("--budgets", default="4,8,16", help="of trees (default 4,8,16)")
    parser.add_argument("--most", type=int, default=16, help="budget of auto (default 16)")
    parser.add_argument("--ways", default="", help="only these, such as plain,auto")
    parser.add_argument("--answers", type=int, default=24, help="texts of each way (default 24)")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer (default 96)")
    parser.add_argument("--prompts", type=int, default=64, help="that are continued, over and over (default 64)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each prompt (default 64)")
    parser.add_argument("--warm", type=int, default=48, help="tokens of each stream before it counts (default 48)")
    parser.add_argument("--slice", type=float, default=0.4, help="seconds of a turn (default 0.4)")
    parser.add_argument("--kv-tokens", type=int, default=1 << 14, help="rows of KV cache (default 16384)")
    chosen = parser.parse_args(arguments)
    chosen.ways = chosen.ways.split(",") if chosen.ways else []
    if wrong := set(chosen.ways) - ways(chosen).keys():
        parser.error(f"--ways {', '.join(sorted(wrong))}: must be among {', '.join(ways(chosen))}")
    return chosen


def main() -> None:
    chosen = parse()
    clock, began = time.perf_counter, time.perf_counter()
    if chosen.device == "cpu":
        clock = time.process_time
        coordinator.time = engine_widths.time = SimpleNamespace(perf_counter=clock)  # type: ignore[attr-defined]
    base = EngineConfig(
        chosen.model,
        device=chosen.device,
        dtype=chosen.dtype,
        max_batch=max(map(int, chosen.streams.split(","))),
        prefix_cache=False,
        kv_tokens=chosen.kv_tokens,
    )
    prompted, loads = texts(chosen), {}
    for name, drafter in ways(chosen).items():
        if chosen.ways and name not in chosen.ways:
            continue
        loads[name] = Load(replace(base, drafter=drafter), prompted, chosen.tokens, clock, name == COUNTED)
        print(f"{time.perf_counter() - began:.1f} s: {name} is ready", file=sys.stderr, flush=True)
    print(machine())
    for streams in map(int, chosen.streams.split(",")):
        compare(loads, streams, chosen)
        print(f"{time.perf_counter() - began:.1f} s: {streams} streams", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        sys.exit(f"bench_streams: {error}")
