"""Speculation by streams: `kdtp serve` with the pair that ships, under `kdtp bench serve`, plain and with trees.

    python scripts/bench_streams.py [--visits 5] [--streams 32,8,1] [--before DIR]

Held-out modules are continued, greedily. The ways take turns, each with a server of its own that knows nothing yet, so
that another program on the machine disturbs all alike, and what a policy pays to learn is counted. Within a visit the
numbers of streams come in the order given. Shown are medians over the visits: tokens per second, by the clock and of
the engine's processor time, and how many times plain decoding's of the same visit. --before: another checkout of kdtp,
whose `--width auto` is one more way.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp.bench.accept import prompts  # noqa: E402
from kdtp.cli.answer import find_tokenizer  # noqa: E402
from kdtp.config import EngineConfig  # noqa: E402
from kdtp.engine.plan import plan  # noqa: E402
from kdtp.train import corpus  # noqa: E402
from scripts.measure import machine, table  # noqa: E402

SERVE = ("--model", "pair", "--max-batch", "64", "--no-prefix-cache", "--log-level", "warning")
TREE = ("--drafter", "dflash", "--drafter-model", "pair")
WAYS = {"plain": ("--drafter", "none"), "tree of 16": TREE, "auto": (*TREE, "--width", "auto")}
REQUESTS = {1: 6, 8: 18, 32: 54}  # else twice as many as streams
_READY = 60.0  # seconds


def write_prompts(path: Path, count: int, length: int) -> None:
    """Stretches of held-out modules as texts, one a line."""
    checked = plan(EngineConfig("pair"))
    tokenizer = find_tokenizer(checked.config, checked.model.vocab_size, needed=True)
    assert tokenizer is not None
    found = prompts(corpus.read(None).held_out, tokenizer, count, length, 0)
    path.write_text("".join(json.dumps(tokenizer.decode(ids)) + "\n" for _, ids in found))


@contextmanager
def server(flags: Sequence[str], checkout: Path) -> Iterator[tuple[str, psutil.Process]]:
    """A server's address, once it is ready, and its engine."""
    command = [sys.executable, "-m", "kdtp", "serve", "--port", "0", *SERVE, *flags]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=checkout, env=environment)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        until = time.monotonic() + _READY
        while not _is_ready(url):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{' '.join(command)}: not ready")
            time.sleep(0.1)
        yield url, max(psutil.Process(process.pid).children(recursive=True), key=_busy)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(_READY)


def _busy(process: psutil.Process) -> float:
    """Seconds of processor time so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def load(url: str, streams: int, texts: Path, tokens: int) -> dict[str, Any]:
    """What `kdtp bench serve` found."""
    requests = REQUESTS.get(streams, 2 * streams)
    flags = ["--url", url, "--prompts", texts, "--max-tokens", tokens, "--concurrency", streams, "--requests", requests]
    command = [sys.executable, "-m", "kdtp", "bench", "serve", *flags, "--warmup", 0, "--json"]
    run = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@dataclass
class Found:
    """Of one way with so many streams, one value a visit: tokens per second, per processor second and per round."""

    clock: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    def add(self, url: str, engine: psutil.Process, streams: int, texts: Path, tokens: int) -> None:
        """One more visit."""
        before = _busy(engine)
        found = load(url, streams, texts, tokens)
        self.clock.append(found["tokens_per_second"])
        self.busy.append(found["tokens"] / (_busy(engine) - before))
        self.rounds.append(found["tokens_per_round"])

    def line(self, plain: Found) -> list[object]:
        """Of the table."""
        line: list[object] = [f"{median(self.rounds):.2f}"]
        for own, others in ((self.clock, plain.clock), (self.busy, plain.busy)):
            times = [rate / other for rate, other in zip(own, others, strict=True)]
            line += [median(own), f"{median(times):.2f} ({min(times):.2f}-{max(times):.2f})"]
        return line


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--visits", type=int, default=5, help="of each way (default 5)")
    parser.add_argument("--streams", default="32,8,1", help="at once (default 32,8,1)")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer (default 96)")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="of each prompt (default 64)")
    parser.add_argument("--before", type=Path, help="another checkout of kdtp")
    return parser.parse_args(arguments)


def main() -> None:
    chosen = parse()
    streams = [int(part) for part in chosen.streams.split(",")]
    ways = {name: (flags, ROOT) for name, flags in WAYS.items()}
    if chosen.before is not None:
        ways["auto before"] = (WAYS["auto"], chosen.before.resolve())
    found: defaultdict[tuple[int, str], Found] = defaultdict(Found)
    with tempfile.TemporaryDirectory() as folder:
        texts = Path(folder) / "code.jsonl"
        write_prompts(texts, max(REQUESTS.get(n, 2 * n) for n in streams), chosen.prompt_tokens)
        for visit in range(chosen.visits):
            for name, (flags, checkout) in ways.items():
                print(f"{visit + 1}/{chosen.visits}  {name}", file=sys.stderr, flush=True)
                with server(flags, checkout) as (url, engine):
                    for n in streams:
                        found[n, name].add(url, engine, n, texts, chosen.tokens)
    print(machine())
    heads = ("streams, way", "tokens/round", "tokens/s", "of plain", "tokens/cpu s", "of plain")
    lines = [(f"{n:3} {name}", *found[n, name].line(found[n, "plain"])) for n in sorted(streams) for name in ways]
    print(table(heads, lines))


if __name__ == "__main__":
    main()
