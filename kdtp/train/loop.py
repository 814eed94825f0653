"""The training loop that target and drafter share: schedule, checkpoints, log, the best weights so far.

All chance of a step comes from the seed and the step's number, so a run that goes on from a checkpoint is the run that
was not interrupted.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

import torch
from torch import Tensor, nn

from kdtp.config import ConfigError
from kdtp.train import state
from kdtp.train.config import TrainConfig
from kdtp.train.journal import Journal
from kdtp.train.screen import Screen

_SYNC = 10  # steps between two looks at the losses, which wait for the device
_CLIP = 1.0  # norm of the gradient


class Job(Protocol):
    """A network in training."""

    @property
    def module(self) -> nn.Module:
        """What is trained."""
        ...

    @property
    def tokens(self) -> int:
        """Of text, per step."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it is."""
        ...

    def loss(self, generator: torch.Generator) -> Tensor:
        """Of one batch, drawn with this generator on the CPU."""
        ...

    def after_step(self) -> None:
        """What follows the optimiser's step."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Figures of held-out text, "loss" among them: the lower the better."""
        ...


@dataclass(frozen=True)
class Limits:
    """steps: of the whole run. minutes: it ends after so many, if that is earlier (0: no limit). The learning rate
    falls to zero by whichever comes first. checkpoint, evaluate: every so many steps."""

    steps: int
    minutes: float
    checkpoint: int
    evaluate: int


@dataclass
class Progress:
    """Where a run is. seconds: spent, in all processes that worked on it. evaluated: the step of the last look at
    held-out text; best, best_step, figures: of the best one."""

    step: int = 0
    seconds: float = 0.0
    best: float = math.inf
    best_step: int = 0
    evaluated: int = -1
    figures: dict[str, float] = field(default_factory=dict)


class Interrupted(Exception):
    """A signal ended the run; its checkpoint is written."""


class Loop:
    """A run in the folder `out`; it goes on from the checkpoint there, which must have the same `key`."""

    def __init__(self, job: Job, train: TrainConfig, limits: Limits, out: Path, seed: int, key: str) -> None:
        self._job, self._train, self._limits, self._seed, self._key = job, train, limits, seed, key
        self._optimiser = _optimiser(job.module, train, job.device)
        self._path = out / state.CHECKPOINT
        self._best: dict[str, Tensor] = {}
        self.progress = Progress()
        if self._path.exists():
            self._restore()
        self.journal = Journal(out / "loss.jsonl", self.progress.step)
        self._losses: list[Tensor] = []
        self._stop = False

    def run(self, screen: Screen) -> None:
        """Train to the end, and leave the best weights in the module. Raises Interrupted, ConfigError for a loss that
        is no number, OSError for what cannot be written."""
        begun = time.monotonic() - self.progress.seconds
        with self._signals():
            while (part := self._part()) < 1.0:
                self._step(part)
                self.progress.step += 1
                self.progress.seconds = time.monotonic() - begun
                if len(self._losses) >= _SYNC:
                    self._flush(screen)
                if self.progress.step % self._limits.evaluate == 0:
                    self._evaluate(screen)
                if self._stop or self.progress.step % self._limits.checkpoint == 0:
                    self._save(screen)
                if self._stop:
                    raise Interrupted(f"stopped after step {self.progress.step}; the same command goes on from there")
        if self.progress.evaluated != self.progress.step:
            self._evaluate(screen)
        self._save(screen)
        self._job.module.load_state_dict(self._best)

    def _part(self) -> float:
        """How much of the run is done."""
        by_time = self.progress.seconds / (60 * self._limits.minutes) if self._limits.minutes else 0.0
        return max(self.progress.step / self._limits.steps, by_time)

    def _step(self, part: float) -> None:
        rate = self._train.learning_rate * min(1.0, (part + 1e-4) / max(self._train.warmup, 1e-4)) * (1 - part)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        seed = (self._seed * 1_000_003 + self.progress.step) % (1 << 63)
        torch.manual_seed(seed)  # of dropout
        self._job.module.train()
        loss = self._job.loss(torch.Generator().manual_seed(seed))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._job.module.parameters(), _CLIP)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self._job.after_step()
        self._losses.append(loss.detach())

    def _flush(self, screen: Screen) -> None:
        """Write down the losses since the last time."""
        if not self._losses:
            return
        losses = torch.stack(self._losses).tolist()
        first = self.progress.step - len(losses) + 1
        self._losses.clear()
        for step, loss in enumerate(losses, first):
            self._want_finite(step, "loss", loss)
        self.journal.losses(first, losses)
        screen.show(self.progress.step, self._part(), losses[-1], self.progress.seconds, self._job.tokens)

    def _want_finite(self, step: int, what: str, loss: float) -> None:
        if not math.isfinite(loss):
            rate = self._train.learning_rate
            raise ConfigError(f"step {step}: the {what} is {loss}; try a learning_rate below {rate:g}", "learning_rate")

    @torch.no_grad()
    def _evaluate(self, screen: Screen) -> None:
        self._flush(screen)
        self._job.module.eval()
        figures = self._job.evaluate()
        self._want_finite(self.progress.step, "held-out loss", figures["loss"])
        self.progress.evaluated = self.progress.step
        self.journal.held_out(self.progress.step, self.progress.seconds, figures)
        screen.held_out(self.progress.step, figures)
        if figures["loss"] < self.progress.best or not self._best:
            self.progress.best, self.progress.best_step = figures["loss"], self.progress.step
            self.progress.figures = figures
            self._best = {name: value.clone() for name, value in self._job.module.state_dict().items()}

    def _save(self, screen: Screen) -> None:
        self._flush(screen)
        tensors = {f"module.{name}": value for name, value in self._job.module.state_dict().items()}
        tensors |= {f"best.{name}": value for name, value in self._best.items()}
        for i, moments in self._optimiser.state_dict()["state"].items():
            tensors |= {f"adam.{i}.{name}": value for name, value in moments.items()}
        state.write(self._path, tensors, {"key": self._key, **vars(self.progress)})

    def _restore(self) -> None:
        tensors, plain = state.read(self._path, self._key)
        plain.pop("key")
        self.progress = Progress(**plain)

        def part(kind: str) -> dict[str, Tensor]:
            return {n.removeprefix(f"{kind}."): v for n, v in tensors.items() if n.startswith(f"{kind}.")}

        self._job.module.load_state_dict(part("module"))
        self._best = {name: value.to(self._job.device) for name, value in part("best").items()}
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in part("adam").items():
            i, _, kind = name.partition(".")
            moments.setdefault(int(i), {})[kind] = value
        groups = self._optimiser.state_dict()["param_groups"]
        self._optimiser.load_state_dict({"state": moments, "param_groups": groups})

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """A signal to end is noticed between two steps; a second Ctrl-C ends at once."""

        def notice(number: int, frame: FrameType | None) -> None:
            self._stop = True
            signal.signal(number, before[signal.Signals(number)])
            os.write(2, b"\nending after this step; the same again ends at once\n")  # print may be what it interrupts

        numbers = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, notice) for number in numbers}
        try:
            yield
        finally:
            for number in numbers:
                signal.signal(number, before[number])


def _optimiser(module: nn.Module, train: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """AdamW; vectors do not decay."""
    matrices = [p for p in module.parameters() if p.dim() >= 2]
    vectors = [p for p in module.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=train.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda")


def precision(device: torch.device) -> torch.autocast:
    """Products in bfloat16 on a GPU, in float32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
