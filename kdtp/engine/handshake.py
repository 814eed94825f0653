"""From the first Hello to the last Ready: every rank is the same version, loads the same model, by a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable

from kdtp.config import EngineConfig, digest
from kdtp.engine.fleet import Fleet
from kdtp.engine.link import EngineFault, Link
from kdtp.log import logger
from kdtp.messages import PROTOCOL_VERSION, FromWorker, Hello, Progress, Ready, Shutdown, Welcome
from kdtp.version import __version__


class Handshake:
    """Welcomes each rank that says hello and waits until all are ready, then calls `on_ready`, once.

    `config.kv_tokens` must be resolved.
    """

    def __init__(
        self, fleet: Fleet, config: EngineConfig, pid: int, on_ready: Callable[[], None] = lambda: None
    ) -> None:
        self._on_ready: Callable[[], None] | None = on_ready
        self._fleet = fleet
        self._model_hash: str | None = None
        self._config_hash = digest(config)
        self._welcome = Welcome(fleet.epoch, pid, config.mapping(), self._config_hash)
        self._world = config.tp
        now = time.monotonic()
        self._deadline = now + config.load_timeout
        self._stall_timeout = config.stall_timeout
        self._stalled_at = now + config.stall_timeout
        self._progress: dict[int, tuple[int, int]] = {}
        self._ready: set[int] = set()

    @property
    def loaded(self) -> tuple[int, int]:
        """Bytes of weights loaded and to load, over all ranks."""
        return sum(done for done, _ in self._progress.values()), sum(total for _, total in self._progress.values())

    def advance(self, seconds: float) -> bool:
        """Work on it for up to `seconds`; whether all ranks are ready.

        EngineFault on refusal or a passed deadline; what on_ready raises.
        """
        now = time.monotonic()
        for link, message, _ in self._fleet.arrivals(min(now + seconds, self._deadline, self._stalled_at)):
            self._take(link, message)
        if len(self._ready) == self._world:
            if self._on_ready is not None:
                self._on_ready()
                self._on_ready = None
            return True
        now = time.monotonic()
        if now >= min(self._deadline, self._stalled_at):
            waiting = [rank for rank in range(self._world) if rank not in self._ready]
            why = (
                "not ready by load_timeout" if now >= self._deadline else f"no progress for {self._stall_timeout:.0f} s"
            )
            raise EngineFault(f"loading: {why}; waiting for ranks {waiting}")
        return False

    def _take(self, link: Link, message: FromWorker) -> None:
        self._stalled_at = time.monotonic() + self._stall_timeout
        match message:
            case Hello():
                self._require(link, "protocol", PROTOCOL_VERSION, message.protocol)
                self._require(link, "version", __version__, message.version)
                self._require(link, "world size", self._world, message.world_size)
                link.send(self._welcome)
            case Progress(epoch=self._fleet.epoch):
                self._progress[link.rank] = (message.done, message.total)
            case Ready(epoch=self._fleet.epoch):
                self._require(link, "config hash", self._config_hash, message.config_hash)
                self._model_hash = self._model_hash or message.model_hash
                self._require(link, "model hash", self._model_hash, message.model_hash)
                self._ready.add(link.rank)
            case _:
                link.dropped["stale"] += 1

    def _require(self, link: Link, what: str, want: object, found: object) -> None:
        if want != found:
            text = f"rank {link.rank} has {what} {found}, wanted is {want}"
            logger.error("%s", text)
            link.send(Shutdown(text))
            raise EngineFault(text)
