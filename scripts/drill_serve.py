"""Failure drills through HTTP: each fault in each phase, and what the clients of `kdtp serve` meet.

    python scripts/drill_serve.py [--tp N] [--fault NAME …] [--phase NAME …]

Prints for each pair how long until /health said so, and until all was well again. A stream must go on to the very text
that it has without a fault, with one end; whatever is left of any process is an error.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.processes import until  # noqa: E402
from tests.service import Reader, Service  # noqa: E402

FAULTS: dict[str, tuple[str, int]] = {
    "worker killed": ("worker", signal.SIGKILL),
    "worker stopped": ("worker", signal.SIGSTOP),
    "worker raises": ("worker", signal.SIGINT),  # a KeyboardInterrupt that nobody expects
    "coordinator killed": ("host", signal.SIGKILL),
    "coordinator stopped": ("host", signal.SIGSTOP),
    "launcher killed": ("launcher", signal.SIGKILL),
}
PHASES = ("load", "prefill", "decode", "idle", "drain")
FLAGS = ("--step-timeout", 2, "--ping-interval", 0.5, "--stall-timeout", 25, "--max-restarts", 50)
FLAGS += ("--prefill-chunk", 16, "--no-prefix-cache", "--keep-alive", 0.5)
BODIES = (
    {"prompt": [1, 2, 3], "max_tokens": 160, "temperature": 0.0},
    {"prompt": [9, 8, 7], "max_tokens": 160, "temperature": 0.9, "seed": 4},
)
SHORT = {"prompt": [4, 5], "max_tokens": 10, "temperature": 0.0}
LONG = tuple({"prompt": [5 + i] * 490, "max_tokens": 12, "temperature": 0.0} for i in range(3))
_DETECTED, _WELL = 32.0, 60.0  # seconds: the most that each may take


class Drill:
    """A running service and what its streams say when nothing happens."""

    def __init__(self, folder: Path, tp: int) -> None:
        self.service = Service(folder, *FLAGS, tp=tp)
        self._truth = self._read(SHORT, *BODIES, *LONG)

    def _read(self, *bodies: dict[str, object]) -> dict[int, str]:
        """Their texts, by id."""
        readers = [Reader(self.service, body) for body in bodies]
        for reader in readers:
            reader.join(60)
            assert reader.error is None and reader.reasons() == ["length"], reader.error
        return {id(reader.body): reader.text for reader in readers}

    def run(self, fault: str, phase: str) -> tuple[float, float]:
        """Seconds until /health told of the fault, and until every stream had its end and the engine was ready."""
        readers = {"prefill": self._prefill, "decode": self._decode, "drain": self._drain}.get(phase, list)()
        if phase == "load":
            self._hit("coordinator killed")
            until(lambda: self._state() != "ready", _DETECTED, "restarting")
        before = self.service.health()[1]["restarts"]
        started = time.monotonic()
        self._hit(fault)
        until(lambda: self._is_known(before, phase), _DETECTED, f"{fault} at {phase} is noticed")
        noticed = time.monotonic() - started
        for reader in readers:
            reader.join(_WELL)
            assert reader.error is None and reader.reasons() == ["length"], (fault, phase, reader.error)
            assert reader.text == self._truth[id(reader.body)], f"{fault} at {phase}: another text"
        if phase == "drain":
            assert self.service.process.wait(_WELL) == 0
        else:
            until(lambda: self._state() == "ready", _WELL, "ready again")
            assert self._read(SHORT) == {id(SHORT): self._truth[id(SHORT)]}
        return noticed, time.monotonic() - started

    def _decode(self) -> list[Reader]:
        readers = [Reader(self.service, body) for body in BODIES]
        until(lambda: all(len(reader.chunks) > 5 for reader in readers), 30, "under way")
        return readers

    def _prefill(self) -> list[Reader]:
        readers = [Reader(self.service, body, start=False) for body in LONG]
        for reader in readers:  # without the time that a client takes to be made: none ends before the last is there
            reader.start()
        until(lambda: len(self.service.call("GET", "/v1/requests")[1]["data"]) == 3, 30, "under way")
        return readers

    def _drain(self) -> list[Reader]:
        readers = self._decode()
        self.service.process.terminate()
        until(lambda: self._state() == "draining", 5, "draining")
        return readers

    def _is_known(self, before: int, phase: str) -> bool:
        health = self.service.health()[1]
        return health["restarts"] > before or (phase != "load" and health["state"] == "restarting")

    def _state(self) -> str:
        return str(self.service.health()[1]["state"])

    def _hit(self, fault: str) -> None:
        """Wait for the process to be there, if an engine has just begun, and do it."""
        role, number = FAULTS[fault]
        until(lambda: self.service.roles(role), 20, role)
        self.service.roles(role)[0].send_signal(number)

    def end(self) -> None:
        """End the service; nothing of it may be left, stopped or not."""
        with self.service:
            if self.service.process.poll() is None:
                self.service.family()
        left = [p for p in self.service.seen if p.is_running() and p.status() != "zombie"]
        assert not left, f"left: {left}"


def drills(folder: Path, tp: int, pairs: Sequence[tuple[str, str]], tell: Callable[..., object]) -> None:
    """Run (fault, phase) after one another, in one service as long as it lives."""
    drill: Drill | None = None
    for number, (fault, phase) in enumerate(pairs):
        if drill is None:
            (place := folder / str(number)).mkdir()
            drill = Drill(place, tp)
        try:
            tell(fault, phase, *drill.run(fault, phase))
        except BaseException:
            print(drill.service.text(), file=sys.stderr)
            drill.end()
            raise
        if phase == "drain":
            drill.end()
            drill = None
    if drill is not None:
        drill.end()


def main() -> int:
    """Run all that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=2)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--phase", action="append", choices=PHASES)
    chosen = parser.parse_args()
    pairs = [(fault, phase) for phase in chosen.phase or PHASES for fault in chosen.fault or FAULTS]
    print(f"{'fault':<22}{'phase':<10}{'noticed':>9}{'well again':>12}")

    def tell(fault: str, phase: str, noticed: float, well: float) -> None:
        print(f"{fault:<22}{phase:<10}{noticed:>7.2f} s{well:>10.2f} s", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        drills(Path(folder), chosen.tp, pairs, tell)
    return 0


if __name__ == "__main__":
    sys.exit(main())
