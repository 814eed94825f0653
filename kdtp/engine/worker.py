"""A worker: one rank of the model. It executes numbered steps and decides nothing.

`Worker.handle` is the whole of its work; `main` is the process around it, started by the launcher or by torchrun.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kdtp import log
from kdtp.config import EngineConfig, build, digest
from kdtp.drafting import Draft, Drafts, Keep
from kdtp.engine import devices, features, guard, rundir
from kdtp.engine.choose import Chooser
from kdtp.engine.features import Shared
from kdtp.engine.link import Payload
from kdtp.engine.rankend import WELCOME_TIMEOUT, RankEnd
from kdtp.log import logger
from kdtp.messages import (
    PROTOCOL_VERSION,
    Commit,
    Fault,
    Forward,
    FromWorker,
    Hello,
    Ids,
    Progress,
    Ready,
    Shutdown,
    ToWorker,
    Welcome,
)
from kdtp.model import comm as comms
from kdtp.model.comm import Comm
from kdtp.model.shard import Shard
from kdtp.types import MOST_THREADS, PAGE_ROWS, WIDE, Logprob
from kdtp.version import __version__

if TYPE_CHECKING:
    from kdtp.draft.dflash.part import Part  # loaded if there is a network

Emit = Callable[[FromWorker, Payload], None]


class Refused(RuntimeError):
    """The coordinator sent this worker away before it was ready; the text is its reason."""


class Worker:
    """One rank. `emit` takes its messages to the coordinator; `connect(device, timeout)` joins the group of ranks."""

    def __init__(self, rank: int, size: int, emit: Emit, connect: Callable[[str, float], Comm]) -> None:
        self.rank = rank
        self.size = size
        self.ended = False
        self.busy = False  # whether to wait busily for what comes next
        self.dropped = 0
        self._emit = emit
        self._connect = connect
        self._epoch = 0
        self._step = 0
        self._shard: Shard | None = None
        self._chooser: Chooser | None = None
        self._part: Part | None = None
        self._left: Shared | None = None  # features for a network at the coordinator

    def hello(self) -> None:
        """Say who this is."""
        self._emit(Hello(PROTOCOL_VERSION, __version__, self.rank, self.size, os.getpid()), None)

    def handle(self, message: ToWorker) -> None:
        """Carry out one message; what there is to answer is emitted. Exceptions are this rank's end."""
        match message:
            case Welcome():
                self._load(message)
            case Forward() if self._is_next(message.epoch, message.step, self._step + 1):
                self._step = message.step
                self._forward(message)
            case Keep() if self._is_next(message.epoch, message.step, self._step):
                self.part.keep(message.kept)
            case Draft() if self._is_next(message.epoch, message.step, self._step):
                self._draft(message)
            case Commit() if self._is_next(message.epoch, message.step, self._step):
                self.shard.commit(message.moves)
                self.shard.release(message.released)
                self.chooser.release(message.released)
            case Shutdown():
                self._shutdown(message.reason)

    @property
    def loaded(self) -> bool:
        """Whether the model is there, and what drafts for it."""
        return self._chooser is not None

    @property
    def shard(self) -> Shard:
        """The loaded shard."""
        assert self._shard is not None, "a step before the model was loaded"
        return self._shard

    @property
    def chooser(self) -> Chooser:
        """What chooses tokens from the shard's logits."""
        assert self._chooser is not None, "a step before the model was loaded"
        return self._chooser

    @property
    def part(self) -> Part:
        """This rank's part of the network that drafts."""
        assert self._part is not None, "a draft of an engine without a network"
        return self._part

    def _is_next(self, epoch: int, step: int, want: int) -> bool:
        if (epoch, step) == (self._epoch, want):
            return True
        self.dropped += 1
        logger.warning("dropped a frame of epoch %d step %d, want %d/%d", epoch, step, self._epoch, want)
        return False

    def _load(self, welcome: Welcome) -> None:
        config = build(EngineConfig, welcome.config, "welcome")
        self._epoch = welcome.epoch
        self.busy = config.busy_wait == "on"
        torch.set_num_threads(config.threads or 1)
        device = devices.device(config.device, self.rank)
        # The coordinator's deadline must pass first, so that it names the rank that hangs.
        comm = self._connect(config.device, max(60.0, 4 * config.step_timeout))
        pages = config.kv_tokens // PAGE_ROWS
        self._shard = Shard.load(config.model, comm, config.dtype, pages, self._progress, device)
        self._prepare_drafts(config)
        self._chooser = Chooser(self._shard)
        if not config.threads and self._shard.config.hidden_size >= WIDE:
            torch.set_num_threads(min(MOST_THREADS, max(1, (os.cpu_count() or 1) // self.size)))
        comm.all_reduce(torch.zeros(1, device=device))
        if device.type == "cuda":
            devices.prepare_gpu(self._shard, self._part, config)
        self._emit(Ready(self._epoch, self.rank, digest(config), self._shard.model_hash), None)

    def _prepare_drafts(self, config: EngineConfig) -> None:
        if not config.drafter.network:
            return
        from kdtp.draft.dflash import part

        if config.drafter.placement == "workers":
            self._part = part.Part(config.drafter, self.shard, self.shard.comm)
        elif self.rank == 0:
            layers = part.taps(config.drafter)
            width = len(layers) * self.shard.config.hidden_size
            self._left = Shared(features.rows(config), width, self.shard.embed.dtype)
            self.shard.tap(layers, self._left.tensor)

    def fault(self, error: BaseException) -> Fault:
        """What to tell the coordinator of this rank's end."""
        return Fault(self._epoch, self._step, self.rank, f"{type(error).__name__}: {error}"[:4096])

    def _progress(self, done: int, total: int) -> None:
        self._emit(Progress(self._epoch, self.rank, done, total), None)

    def _forward(self, message: Forward) -> None:
        ids: list[int] = []
        frame, shape = None, None
        wanted: list[Logprob] = []
        if message.seqs:
            self.chooser.begin(message.begun)
            if not message.want_logits and self.chooser.plain(message.seqs):
                ids = self.chooser.best(self.shard.forward(message.seqs))
            else:
                logits = self.shard.forward_tokens(message.seqs)
                if message.want_logits:
                    full = self.chooser.full(logits)
                    if self.rank == 0:
                        frame, shape = full.cpu().numpy().tobytes(), (full.shape[0], full.shape[1])
                ids, wanted = self.chooser.choose(logits, message.seqs)
            self.shard.comm.check()
            if self._left is not None:
                self._left.check(self.shard.features)
        made, left = self.shard.comm.made, None if self._left is None else self._left.fd
        self._emit(Ids(self._epoch, self._step, self.rank, tuple(ids), tuple(wanted), shape, made, left), frame)

    def _draft(self, message: Draft) -> None:
        drafted, comm = self.part.draft(message.roots, message.shape), self.shard.comm
        if drafted is None:
            comm.check()
            return
        shape, fetch = drafted

        def fetched() -> bytes:
            data = fetch()
            comm.check()
            return data

        self._emit(Drafts(self._epoch, self._step, self.rank, shape), fetched)

    def _shutdown(self, reason: str) -> None:
        if self._shard is None:
            raise Refused(reason)
        self.ended = True


def serve(worker: Worker, end: RankEnd) -> None:
    """Carry out messages until the coordinator says Shutdown or ends."""
    worker.hello()
    message = end.receive(WELCOME_TIMEOUT)
    if message is None:
        raise Refused(f"no welcome from the coordinator within {WELCOME_TIMEOUT:.0f} s")
    if isinstance(message, Welcome):
        end.join(message.coordinator_pid)
    while message is not None:
        worker.handle(message)
        message = None if worker.ended else end.receive(None, worker.busy)


def _environment(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise SystemExit(f"{name} = {value!r}: want the number that the launcher or torchrun sets")
    return int(value)


def run(folder: Path, rank: int, size: int) -> int:
    """One rank from hello to its end; the exit code for its process."""
    end = RankEnd(folder, rank)
    worker = Worker(rank, size, end.emit, lambda device, timeout: comms.connect(device, rank, size, timeout))
    try:
        serve(worker, end)
    except (EOFError, Refused) as error:
        logger.error("%s", error)
        code = 1
    except Exception as error:
        unsound = isinstance(error, ValueError) and not worker.loaded  # what the user gave, and it says what
        logger.error("rank %d cannot go on: %s", rank, error, exc_info=not unsound)
        end.emit(worker.fault(error), None)
        code = 1
    else:
        code = 0
    end.close()
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """The process of one rank, under the launcher or torchrun: python -m kdtp.engine.worker --run-dir DIR."""
    parser = argparse.ArgumentParser(prog="kdtp.engine.worker", description=main.__doc__)
    parser.add_argument("--run-dir", required=True, type=Path, help="the coordinator's run folder")
    log.add_flags(parser)
    chosen = parser.parse_args(arguments)
    folder = rundir.check(chosen.run_dir)
    rank, size = _environment("RANK"), _environment("WORLD_SIZE")
    guard.exit_on_any_exception()
    log.setup(f"worker tp={rank}", chosen.log_level, chosen.log_format)
    return run(folder, rank, size)


if __name__ == "__main__":  # under torchrun
    guard.end_with_parent(os.getppid())
    guard.dump_stacks_on_signal()
    guard.leave(main())
