"""The server process: a bound port, the application, the engine behind it, and the order in which they end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import uvicorn

from kdtp.engine import guard
from kdtp.log import logger
from kdtp.server.app import Endpoint, Options
from kdtp.server.connection import Connection
from kdtp.server.driver import Driver
from kdtp.server.gate import MOST_HEAD, Gate
from kdtp.server.prompts import Model

EXIT_DEAD = 70  # as of an engine that broke
_LAST_WORDS = 2.0  # seconds for the last answers to leave


@dataclass(frozen=True)
class Settings:
    """keys: of the API; shutdown_timeout: seconds for open requests once told to end; most_restarts within
    restart_window seconds before the service gives up; hosts: names that requests may call this server by, beside its
    address."""

    keys: Sequence[str] = ()
    shutdown_timeout: float = 30.0
    most_restarts: int = 3
    restart_window: float = 300.0
    hosts: Sequence[str] = ()
    options: Options = field(default_factory=Options)


class _Uvicorn(uvicorn.Server):
    """Without signal handlers: the order of the end is ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. ValueError naming host and port if it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        bound.listen(1024)
    except OSError as error:
        raise ValueError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return bound


async def serve(bound: socket.socket, model: Model, settings: Settings) -> int:
    """Serve until told to end (0), or until the engine has died too often (EXIT_DEAD)."""
    ended = asyncio.Event()
    hurry = asyncio.Event()

    def told() -> None:
        (hurry if ended.is_set() else ended).set()

    for number in guard.ending_signals():
        asyncio.get_running_loop().add_signal_handler(number, told)
    driver = Driver(model.plan, settings.most_restarts, settings.restart_window, ended.set)
    gate = Gate(Endpoint(model, driver, settings.options).app(), settings.keys, _hosts(bound, settings))
    logging.getLogger("uvicorn").handlers[:] = logger.handlers
    http = _Uvicorn(_config(gate))
    driver.start()
    serving = asyncio.create_task(http.serve(sockets=[bound]))
    waiting = asyncio.create_task(ended.wait())
    await asyncio.wait({serving, waiting}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    dead = driver.health.state == "dead"
    if not dead:
        driver.drain()
        await _drained(driver, settings.shutdown_timeout, hurry)
    await driver.end()
    await _quiet(gate)
    http.should_exit = True
    await serving
    return EXIT_DEAD if dead or driver.health.state == "dead" else 0


def _hosts(bound: socket.socket, settings: Settings) -> frozenset[str] | None:
    """The names by which a server for this machine alone may be called; None: any, for one that others reach."""
    address = bound.getsockname()[0]
    if not is_loopback(address) and not settings.hosts:
        return None
    own = f"[{address}]" if ":" in address else address
    return frozenset({"localhost", "127.0.0.1", "[::1]", own, *settings.hosts})


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches it."""
    return address == "::1" or address.startswith("127.")


def _config(gate: Gate) -> uvicorn.Config:
    return uvicorn.Config(
        gate,
        http=Connection,  # by h11, whose limit of a head holds; httptools has none
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        h11_max_incomplete_event_size=MOST_HEAD,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=2,
    )


async def _drained(driver: Driver, seconds: float, hurry: asyncio.Event) -> None:
    """Wait for the open requests."""
    if driver.open:
        logger.info("ending: %d open request(s) have %.0f s", driver.open, seconds)
    deadline = time.monotonic() + seconds
    while driver.open and time.monotonic() < deadline and driver.health.state != "dead" and not hurry.is_set():
        await asyncio.sleep(0.05)


async def _quiet(gate: Gate) -> None:
    """Wait until the last answers have left."""
    deadline = time.monotonic() + _LAST_WORDS
    while gate.active and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
