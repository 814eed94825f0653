"""`kdtp engine`: the launcher of one engine, and its RPC address for clients."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import threading
from pathlib import Path

from kdtp import log
from kdtp.cli.flags import add_engine_flags, engine_config
from kdtp.engine import guard, rundir
from kdtp.engine.plan import plan
from kdtp.log import logger


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    add_engine_flags(parser)
    parser.add_argument("--run-dir", type=Path, help="private folder for sockets (default: a new one)")
    parser.add_argument("--end-with-stdin", action="store_true", help="end when standard input is closed")
    parser.add_argument("--end-with-pidfd", type=_pidfd, metavar="FD", help="end when the process of this pidfd does")
    log.add_flags(parser)


def run(chosen: argparse.Namespace) -> int:
    """Run until told to end (SIGTERM, SIGHUP, Ctrl-C, RPC shutdown: code 0) or broken (code 70)."""
    log.setup("launcher", chosen.log_level, chosen.log_format)
    checked = plan(engine_config(chosen))
    config = checked.config
    for note in checked.notes:
        logger.info("%s", note)
    folder = rundir.check(chosen.run_dir.resolve()) if chosen.run_dir else rundir.create()
    owned = chosen.end_with_pidfd is not None
    tidy = rundir.clean if chosen.run_dir and not owned else rundir.remove
    held = rundir.lock(folder)

    def leave(number: int, frame: object) -> None:
        tidy(folder)
        guard.leave(0)

    # Until there are children to look after, an end is just an end; importing torch, for more than one, takes a while.
    for number in guard.ending_signals():
        signal.signal(number, leave)
    if chosen.end_with_stdin:
        threading.Thread(target=_end_with_stdin, name="stdin-watch", daemon=True).start()
    if owned:
        watch = threading.Thread(
            target=_end_with_process, args=[chosen.end_with_pidfd], name="owner-watch", daemon=True
        )
        watch.start()
    from launcher.group import Group

    def command(role: str, *arguments: str) -> tuple[str, ...]:
        place = ("--run-dir", str(folder), "--log-level", chosen.log_level, "--log-format", chosen.log_format)
        return ("-m", "kdtp.engine.start", str(os.getpid()), role, *place, *arguments)

    lead = command("host", "--config", json.dumps(config.mapping()))
    size = config.tp if config.tp > 1 else 0  # one rank lives in the coordinator
    group = Group(lead, command("worker"), size, str(folder / rundir.SCRATCH), logger.warning)
    try:
        group.start()
    except (OSError, RuntimeError) as error:  # of the system, of torch's store; what has been started ends with us
        logger.error("the engine's processes could not be started: %s", str(error).partition("\n")[0])
        tidy(folder)
        guard.leave(1)
    print(f"rpc {rundir.endpoint(folder, 'rpc')}", flush=True)
    code = group.run()
    tidy(folder)
    os.close(held)
    guard.leave(code)


def _end_with_stdin() -> None:
    """SIGTERM for this process once standard input is closed at its other end."""
    try:
        while os.read(0, 4096):
            pass
    except OSError as error:
        logger.warning("--end-with-stdin: standard input: %s", error)
    os.kill(os.getpid(), signal.SIGTERM)


def _pidfd(text: str) -> int:
    try:
        signal.pidfd_send_signal(int(text), 0)
    except ProcessLookupError:  # of a process that has ended
        pass
    except (OSError, ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: must be the number of a pidfd") from None
    return int(text)


def _end_with_process(pidfd: int) -> None:
    """SIGTERM for this process once the other one has ended."""
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    ended.poll()
    os.kill(os.getpid(), signal.SIGTERM)
