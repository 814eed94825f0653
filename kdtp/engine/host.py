"""The coordinator's process: bring up the workers, then serve RPC and run rounds until told to end."""

from __future__ import annotations

import argparse
import logging
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import msgspec
import zmq

from kdtp import log
from kdtp.config import EngineConfig, build
from kdtp.engine import guard, rundir
from kdtp.engine.assemble import assemble, local_link
from kdtp.engine.compiling import Compiling
from kdtp.engine.link import EngineFault, Link, ZmqLink
from kdtp.engine.outcome import Event
from kdtp.engine.picture import picture
from kdtp.engine.plan import Plan, plan
from kdtp.engine.progress import LoadLine
from kdtp.engine.request import Request
from kdtp.engine.rpc import Server
from kdtp.engine.scheduler import QueueFull
from kdtp.log import logger
from kdtp.messages import (
    Cancel,
    Failed,
    FromEngine,
    Refused,
    ShutdownQuery,
    Status,
    StatusQuery,
    Submit,
    Terminal,
    ToEngine,
    Usage,
)
from kdtp.watch import Watch

EXIT_FAULT = 70  # a rank died, hung, diverged or failed
_SLICE = 0.25  # seconds between two looks at the stop flag
_LINGER = 0.5  # seconds for the last messages to leave


class Host:
    """One engine behind RPC. `run` returns the exit code: 0 when told to end, EXIT_FAULT when the engine broke."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        self._plan = plan
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # Bound before anything is loaded, so that clients can see how far loading is.
        self._rpc = Server(self._context, rundir.endpoint(folder, "rpc"))
        self._line = LoadLine()
        links: list[Link]
        config = plan.config
        if config.tp == 1:
            links = [local_link(self._while_loading)]
        else:
            links = [ZmqLink(self._context, folder, rank) for rank in range(config.tp)]
        self._coordinator, self._handshake = assemble(plan, links, serves=True)
        self._fleet = self._coordinator.fleet
        self._fleet.on_long = self._tell_patience
        self._compiling = Compiling(self._coordinator.compile, config.max_queue)
        self._poller = zmq.Poller()
        self._poller.register(self._rpc.socket, zmq.POLLIN)
        self._poller.register(self._compiling.wake, zmq.POLLIN)
        self._clients: dict[int, tuple[bytes, int]] = {}
        self._opened = 0
        self._asker = b""  # who last asked for Status
        self._loaded = 0, 0
        self._state = "loading"
        self._heard = time.monotonic()
        self._stop: str | None = None

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: end after the present round."""
        self._stop = f"signal {signal.Signals(signum).name}"

    def run(self) -> int:
        """Serve until told to end."""
        try:
            while self._stop is None:
                self._turn()
            logger.info("ending: %s", self._stop)
            self._end("shutdown", f"the engine was told to end ({self._stop})")
            return 0
        except Exception as error:
            # What the user gave may be unsound; all else is a bug of ours, and the clients must still be told.
            known = isinstance(error, EngineFault) or (self._state == "loading" and isinstance(error, ValueError))
            text = str(error) if known else f"the coordinator failed: {type(error).__name__}: {error}"
            logger.error("engine fault: %s", text, exc_info=not known)
            self._end("engine", text)
        return EXIT_FAULT

    def _turn(self) -> None:
        self._receive()
        self._take_compiled()
        if self._state == "loading":
            ready = self._handshake.advance(_SLICE / 10)
            self._tell_progress(*self._handshake.loaded)
            self._loaded = self._handshake.loaded
            if ready:
                self._state = "ready"
                logger.info("ready: %d rank(s), %d KV pages", self._plan.config.tp, self._coordinator.pool.total)
        elif not self._coordinator.idle:
            self._tell(self._coordinator.step())
            self._heard = time.monotonic()
        else:
            self._wait()

    def _receive(self) -> None:
        for client, message in self._rpc.receive():
            self._serve(client, message)

    def _while_loading(self, done: int, total: int) -> None:
        """A rank in this process loads in one go: in between clients are answered."""
        self._loaded = done, total
        self._tell_progress(done, total)
        self._receive()

    def _tell_progress(self, done: int, total: int) -> None:
        if logger.isEnabledFor(logging.INFO):  # a client that started this quietly draws a line of its own
            self._line.show(done, total)

    def _wait(self) -> None:
        """Idle: until a client speaks, a grammar is there or a worker ends; now and then every rank is pinged.

        A client that asks for Status all the time must not keep us from that.
        """
        self._poller.poll(int(_SLICE * 1000))
        gone = self._fleet.ended()
        if gone:
            raise EngineFault(gone)
        if time.monotonic() - self._heard > self._plan.config.ping_interval:
            self._fleet.forward([])
            self._heard = time.monotonic()

    def _serve(self, client: bytes, message: ToEngine) -> None:
        match message:
            case Submit():
                self._submit(client, message)
            case Cancel():
                self._cancel(self._named(client, message.request))
            case Watch():
                for request_id in self._named(client, message.request):
                    self._coordinator.watched.ask(request_id, message.rounds)  # its grammar may not be there yet
            case StatusQuery():
                self._asker = client
                self._rpc.send(client, self._status(client, message))
            case ShutdownQuery():
                self._stop = "a client asked for it"

    def _submit(self, client: bytes, message: Submit) -> None:
        label = message.request
        if (client, label) in self._clients.values():
            self._rpc.send(client, Failed(None, "invalid", f"request = {label}: is the label of an open request"))
            return
        self._opened += 1
        request = Request(
            id=self._opened,
            prompt=message.prompt,
            params=message.params,
            speculate=message.speculate,
            want_logits=message.want_logits,
            budget=message.budget,
            priority=message.priority,
            salt=message.salt,
            tokens=list(message.given),
        )
        self._clients[request.id] = (client, label)
        self._coordinator.watched.ask(request.id, message.watch)
        with self._refusing(request):
            if message.params.grammar is None:
                self._coordinator.submit(request)
            else:
                self._coordinator.check(request)
                self._compiling.add(request)

    def _take_compiled(self) -> None:
        for request, compiled in self._compiling.take():
            if request.id not in self._clients:
                continue  # its client is gone
            with self._refusing(request):
                request.matcher = compiled.result()
                self._coordinator.submit(request)

    @contextmanager
    def _refusing(self, request: Request) -> Iterator[None]:
        """Tell the client of a request why it cannot be served."""
        try:
            yield
            return
        except ValueError as error:
            end: Failed | Refused = Failed(request.id, "invalid", str(error))
        except QueueFull as error:
            end = Refused(request.id, str(error), error.retry_after)
        self._coordinator.watched.forget(request.id)
        self._tell([Event(end)])

    def _named(self, client: bytes, label: int) -> list[int]:
        return [i for i, who in self._clients.items() if who == (client, label)]

    def _cancel(self, ids: Iterable[int]) -> None:
        for request_id in ids:
            event = self._drop(request_id)
            if event is not None:
                self._tell([event])

    def _drop(self, request_id: int) -> Event | None:
        self._coordinator.watched.forget(request_id)
        return self._compiling.cancel(request_id) or self._coordinator.cancel(request_id)

    def _tell(self, events: Iterable[Event]) -> None:
        """Pass events on; the requests of a client that cannot be reached are cancelled."""
        gone: set[bytes] = set()
        for event in events:
            message = event.message
            assert message.request is not None
            known = self._clients.get(message.request)
            if known is None:
                continue
            client, label = known
            if isinstance(message, Terminal):
                del self._clients[message.request]
            if not self._rpc.send(client, _relabel(message, label), event.logits):
                gone.add(client)
        for client in gone:
            lost = [i for i, who in self._clients.items() if who[0] == client]
            for request_id in lost:
                del self._clients[request_id]
                self._drop(request_id)

    def _tell_patience(self, seconds: float) -> None:
        """Clients are not answered during a step: before a long one they learn how long that may be."""
        for client in {client for client, _ in self._clients.values()}:
            self._rpc.send(
                client, msgspec.structs.replace(self._status(client, StatusQuery(usages=True)), patience=seconds)
            )

    def _status(self, client: bytes, query: StatusQuery) -> Status:
        seen = picture(self._plan, self._coordinator, self._state, self._loaded)
        return msgspec.structs.replace(
            seen,
            upto=query.upto,
            open=tuple(label for who, label in self._clients.values() if who == client),
            usages=self._usages(client) if query.usages else {},
            waiting=seen.waiting + len(self._compiling),
            counters=seen.counters | self._rpc.dropped,
        )

    def _usages(self, client: bytes) -> dict[int, Usage]:
        """Of the client's requests that run."""
        running = [(self._clients.get(request.id), request) for request in self._coordinator.scheduler.running]
        return {who[1]: request.usage() for who, request in running if who is not None and who[0] == client}

    def _end(self, code: str, text: str) -> None:
        """One terminal event for every open request, then the workers are told, then everything is closed."""
        self._tell(self._coordinator.fail_all(code, text) + self._compiling.fail_all(code, text))
        if code == "engine" and self._asker:  # why, and what was counted, before it is gone
            last = msgspec.structs.replace(self._status(self._asker, StatusQuery()), fault=text)
            self._rpc.send(self._asker, last)
        if code == "shutdown":
            self._fleet.dismiss(text)
        self._rpc.close(_LINGER)
        self._fleet.close()
        self._context.term()


def _relabel(message: FromEngine, label: int) -> FromEngine:
    return msgspec.structs.replace(message, request=label)


def main(arguments: Sequence[str] | None = None) -> int:
    """The coordinator, beside workers that the launcher or torchrun starts."""
    parser = argparse.ArgumentParser(prog="kdtp.engine.host", description=main.__doc__)
    parser.add_argument("--run-dir", required=True, type=Path, help="private folder for the sockets")
    parser.add_argument("--config", required=True, help="EngineConfig as a JSON object")
    log.add_flags(parser)
    chosen = parser.parse_args(arguments)
    log.setup("coordinator", chosen.log_level, chosen.log_format)
    try:
        config = build(EngineConfig, msgspec.json.decode(chosen.config), "--config")
        host = Host(plan(config), rundir.check(chosen.run_dir))
    except ValueError as error:
        logger.error("%s", error)
        return 2
    for number in guard.ending_signals():
        signal.signal(number, host.stop)
    return host.run()


if __name__ == "__main__":  # beside torchrun
    guard.dump_stacks_on_signal()
    guard.leave(main())
