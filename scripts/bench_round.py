"""Measure what a round costs outside the forward, in this process and with worker processes.

    python scripts/bench_round.py [--quick] [--json]

The whole engine runs, coordinator, links and workers, but for the network: stub_rank.py stands in for a shard. Every
case runs on every kind of ranks; all are kept open and visited in turn, so that a busy machine disturbs all alike.
Then the tiny model runs whole, so that the forward can be seen beside it. All times are microseconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import zmq

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp import Engine, SamplingParams, draft  # noqa: E402
from kdtp.config import DrafterConfig, EngineConfig  # noqa: E402
from kdtp.engine import rundir, worker  # noqa: E402
from kdtp.engine.assemble import local_link  # noqa: E402
from kdtp.engine.coordinator import Coordinator  # noqa: E402
from kdtp.engine.fleet import Fleet  # noqa: E402
from kdtp.engine.handshake import Handshake  # noqa: E402
from kdtp.engine.link import Link, ZmqLink  # noqa: E402
from kdtp.engine.request import Request  # noqa: E402
from kdtp.messages import Forward, ToWorker  # noqa: E402
from kdtp.model.comm import Solo  # noqa: E402
from kdtp.spec import pick  # noqa: E402
from scripts.measure import Spread, figure, machine, repeat, spread, spreads, table  # noqa: E402
from scripts.stub_rank import LENGTH, MODEL, TOGETHER, VOCAB, StubShard, text  # noqa: E402

LOCAL = 0  # "worker processes" of a rank in this process
PROMPT = 256
PLACES = {LOCAL: "in-process", 1: "1 worker", 2: "2 workers", 4: "4 workers"}
PARTS = ("nodes", "bytes", "draft", "build", "encode", "decode", "stub", "pick", "accept", "commit", "other")
BY_PLACE = ("send", "wait", "round", "cpu")
STAGES = ("draft", "build", "verify", "accept", "commit")


@dataclass(frozen=True)
class Scope:
    """How much is run. rounds: counted in a visit, by batch size; places: keys of PLACES; tp: of the tiny model."""

    visits: int
    rounds: dict[int, int]
    budgets: tuple[int, ...]
    places: tuple[int, ...]
    tp: tuple[int, ...]


FULL = Scope(10, {1: 15, 8: 6, 32: 3}, (16, 64), (LOCAL, 1, 2, 4), (1, 2, 4))
QUICK = Scope(2, {1: 2, 2: 2}, (16,), (LOCAL, 1), (1,))


@dataclass(frozen=True)
class Case:
    """What runs. batch: sequences; budget: tree nodes below the root; together: ranks choose by a collective."""

    drafter: str
    batch: int
    budget: int
    together: bool = False

    @property
    def config(self) -> DrafterConfig:
        """An oracle that often errs, so that rows are moved as with a real drafter."""
        return DrafterConfig(self.drafter, block=8, budget=self.budget, hit=(0.9,), rank=4)


class TimedFleet(Fleet):
    """A fleet that knows its last Forward and how many seconds it took to send."""

    sent = Forward(0, 0, ())
    sending = 0.0

    def send(self, message: ToWorker) -> None:
        """As Fleet."""
        started = time.perf_counter()
        super().send(message)
        if isinstance(message, Forward):
            self.sent, self.sending = message, time.perf_counter() - started


class Track:
    """One case on one fleet, in the middle of its texts; `samples` by stage."""

    def __init__(self, case: Case, config: EngineConfig, fleet: TimedFleet, first_id: int) -> None:
        written = text()
        prompt, rest = tuple(written[:PROMPT]), tuple(written[PROMPT:])
        self.case = case
        self.samples: defaultdict[str, list[float]] = defaultdict(list)
        self._fleet = fleet
        self._stub = StubShard(Solo())
        drafter = draft.make(case.config, {prompt: rest}, VOCAB)
        self._coordinator = Coordinator(dataclasses.replace(config, drafter=case.config), MODEL, fleet, drafter)
        params = SamplingParams(MODEL.max_position_embeddings - PROMPT)
        first_id += TOGETHER if case.together else 0
        self._requests = [Request(first_id + i, prompt, params, salt=str(i)) for i in range(case.batch)]
        for request in self._requests:
            self._coordinator.submit(request)
        self._coordinator.step()
        assert not any(request.prefilling for request in self._requests)

    def visit(self, rounds: int) -> None:
        """Run a round that is not counted, since it finds caches cold, and then `rounds`."""
        self._coordinator.step()
        for _ in range(rounds):
            for stage, seconds in self._round().items():
                self.samples[stage].append(1e6 * seconds)
        self._measure_message(self._fleet.sent)

    def _round(self) -> dict[str, float]:
        before = dict(self._requests[0].seconds)
        started, cpu_started = time.perf_counter(), time.thread_time()
        self._coordinator.step()
        total, cpu = time.perf_counter() - started, time.thread_time() - cpu_started
        spent = {stage: seconds - before[stage] for stage, seconds in self._requests[0].seconds.items()}
        spent["other"] = total - sum(spent.values())
        spent["send"], spent["wait"] = self._fleet.sending, spent.pop("verify") - self._fleet.sending
        return {**spent, "round": total, "cpu": cpu}

    def _measure_message(self, message: Forward) -> None:
        """Its size, what it costs to write and to read, what its forward costs here, and what it costs to choose."""
        frame = msgspec.msgpack.encode(message)
        decoder = msgspec.msgpack.Decoder(ToWorker)
        logits = self._stub.forward(message.seqs)
        self.samples["nodes"].append(len(logits) / len(message.seqs) - 1)
        self.samples["bytes"].append(len(frame))
        self.samples["encode"] += repeat(lambda: msgspec.msgpack.encode(message), 3)
        self.samples["decode"] += repeat(lambda: decoder.decode(frame), 3)
        self.samples["stub"] += repeat(lambda: self._stub.forward(message.seqs), 3)
        self.samples["pick"] += repeat(lambda: pick.argmax(logits), 3)


class Bench:
    """Fleets of stub ranks, and every case on every fleet."""

    def __init__(self, scope: Scope, stack: ExitStack) -> None:
        self._scope = scope
        self._stack = stack
        self._context = stack.enter_context(zmq.Context())
        configs = {place: self._config(max(1, place)) for place in scope.places}
        self._fleets = {place: TimedFleet(self._links(place), 1, configs[place].step_timeout) for place in scope.places}
        with mock.patch.object(worker, "Shard", StubShard):  # for the rank in this process
            for handshake in [Handshake(self._fleets[p], configs[p], os.getpid()) for p in scope.places]:
                while not handshake.advance(1.0):
                    pass
        cases = [Case(*values) for values in itertools.product(("oracle", "ngram"), scope.rounds, scope.budgets)]
        cases.append(Case("ngram", 1, 16, together=True))
        ids = itertools.count(0, max(scope.rounds))  # of each track's first sequence
        self.tracks = {
            case: {place: Track(case, configs[place], fleet, next(ids)) for place, fleet in self._fleets.items()}
            for case in cases
        }
        self.wire: dict[int, list[float]] = {place: [] for place in scope.places}

    def _config(self, tp: int) -> EngineConfig:
        most = max(self._scope.rounds)
        sizes = {"kv_tokens": most * LENGTH, "max_batch": most, "prefill_chunk": most * PROMPT}
        return EngineConfig("stub", tp=tp, threads=1, step_timeout=60.0, **sizes)

    def _links(self, place: int) -> Sequence[Link]:
        if place == LOCAL:
            return [local_link()]
        folder = rundir.create()
        self._stack.callback(rundir.remove, folder)
        links = [ZmqLink(self._context, folder, rank) for rank in range(place)]
        for link in links:
            self._stack.callback(link.close)
        lead = "-c 'import signal; signal.pause()'"
        ranks = [str(ROOT / "scripts" / "stub_rank.py"), "--run-dir", str(folder), "--log-level", "warning"]
        command = [sys.executable, "-m", "launcher", "--nproc", str(place), "--lead", lead, "--", *ranks]
        launcher = subprocess.Popen(command, cwd=ROOT)
        self._stack.callback(launcher.wait, 10)
        self._stack.callback(launcher.send_signal, signal.SIGTERM)
        return links

    def run(self) -> None:
        """All visits."""
        for _ in range(self._scope.visits):
            for case, tracks in self.tracks.items():
                for track in tracks.values():
                    track.visit(self._scope.rounds[case.batch])
            for place, fleet in self._fleets.items():
                self.wire[place] += repeat(lambda fleet=fleet: fleet.forward([]), 20)


def tiny_model(scope: Scope) -> dict[int, dict[str, list[float]]]:
    """By tensor-parallel size and stage, microseconds a round of the golden run, from what its request is told."""
    samples: dict[int, dict[str, list[float]]] = {tp: defaultdict(list) for tp in scope.tp}
    with ExitStack() as stack:
        model, drafter = str(ROOT / "tests" / "refs" / "model_tiny.kdtr"), DrafterConfig("oracle")
        configs = {tp: EngineConfig(model, tp=tp, threads=1, drafter=drafter) for tp in scope.tp}
        engines = {tp: stack.enter_context(Engine.of(config)) for tp, config in configs.items()}
        for visit in range(2 * scope.visits):
            for tp, engine in engines.items():
                golden = engine.plan.golden
                (done,) = engine.generate([golden.prompt], SamplingParams(max_tokens=len(golden.tokens)))
                for stage, milliseconds in done.usage.timings_ms.items():
                    if visit > 0 and stage != "prefill":
                        samples[tp][stage].append(1e3 * milliseconds / done.usage.rounds)
    return samples


def measure(scope: Scope) -> dict[str, Any]:
    """Everything, as plain values; each figure with its number of samples and its spread."""
    with ExitStack() as stack:
        (bench := Bench(scope, stack)).run()
    return {
        "machine": machine(),
        "unit": "microseconds",
        "rounds": [_case(case, bench.tracks[case]) for case in bench.tracks],
        "wire": {PLACES[place]: spread(samples) for place, samples in bench.wire.items()},
        "tiny_model": {f"tp {tp}": spreads(samples) for tp, samples in tiny_model(scope).items()},
    }


def _case(case: Case, tracks: Mapping[int, Track]) -> dict[str, Any]:
    pooled = {part: [x for track in tracks.values() for x in track.samples[part]] for part in PARTS}
    places = {
        PLACES[place]: spreads({part: track.samples[part] for part in BY_PLACE}) for place, track in tracks.items()
    }
    return {**dataclasses.asdict(case), "parts": spreads(pooled), "places": places}


def show(result: Mapping[str, Any]) -> str:
    """The result as tables."""
    wire, tiny = result["wire"], result["tiny_model"]
    named = [(_name(r), r["parts"], list(r["places"].values())) for r in result["rounds"]]
    case = ("drafter", "batch", "budget")
    sections = [
        (
            "Parts of a round: medians over all places",
            (*case, *PARTS),
            [[*name, *(parts[part]["median"] for part in PARTS)] for name, parts, _ in named],
        ),
        (
            "The round: median (10th-90th percentile)",
            (*case, "n", *wire),
            [[*name, r[0]["round"]["n"], *(figure(p["round"]) for p in r)] for name, _, r in named],
        ),
        (
            "Of it: median to send + to wait for all answers (median processor time of the coordinator's thread)",
            (*case, *wire),
            [[*name, *map(_verify, r)] for name, _, r in named],
        ),
        (
            "The wire: a round trip without sequences",
            ("place", "n", "time"),
            [[place, s["n"], figure(s)] for place, s in wire.items()],
        ),
        (
            "The tiny model, real: stages of a round of its golden run",
            ("ranks", "n", *STAGES),
            [[tp, s["draft"]["n"], *(figure(s[stage]) for stage in STAGES)] for tp, s in tiny.items()],
        ),
    ]
    texts = ["{cpu}, {cores} cores, load {load}; microseconds".format(**result["machine"])]
    return "\n\n".join([*texts, *(f"{title}\n{table(header, rows)}" for title, header, rows in sections)])


def _name(case: Mapping[str, Any]) -> list[Any]:
    return [case["drafter"] + (" together" if case["together"] else ""), case["batch"], case["budget"]]


def _verify(place: Mapping[str, Spread]) -> str:
    send, wait, cpu = (f"{place[part]['median']:.0f}" for part in ("send", "wait", "cpu"))
    return f"{send} + {wait} ({cpu})"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Measure what a round costs outside the forward.")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    chosen = parser.parse_args(arguments)
    result = measure(QUICK if chosen.quick else FULL)
    print(json.dumps(result) if chosen.json else show(result))


if __name__ == "__main__":
    main()
