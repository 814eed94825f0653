"""Command line of kdtp."""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from types import ModuleType

from kdtp.version import __version__

COMMANDS = {
    "generate": "answer or continue a text, or a prompt of token ids",
    "chat": "talk with a model on the terminal",
    "serve": "answer OpenAI's API over HTTP",
    "bench": "measure an endpoint under load, an engine at growing contexts, or what drafts bring",
    "engine": "run coordinator and workers, print the RPC address",
    "build-kernels": "compile the CUDA kernels with nvcc",
    "inspect": "show what is in a KDTR file or a model folder",
    "train": "train a small target or its drafter",
    "convert": "turn a model folder into a KDTR file, or back",
    "doctor": "show whether this machine can run kdtp",
}

EXIT_INPUT = 2  # bad flag, file or value
EXIT_INTERRUPTED = 130
EXIT_OUTPUT = 74  # stdout is a file, and its disk is full
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)  # of files that we open the name is there
EXIT_PIPE = 141  # as a shell shows for a program that SIGPIPE ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Bad input is one line on stderr and exit code 2, a full disk behind stdout one line; a reader of
    stdout that leaves is no error."""
    try:
        try:
            return _run(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        _drop_output()
        return EXIT_PIPE
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _drop_output()
        print(f"kdtp: standard output: {os.strerror(error.errno).lower()}", file=sys.stderr)
        return EXIT_OUTPUT


def _drop_output() -> None:
    """Python flushes stdout once more when it ends: what is left must have somewhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run(given: Sequence[str]) -> int:
    if given[:1] in (["engine"], ["serve"]):
        from kdtp.engine import guard

        # A service that is told to end has ended in good order, also when it had only begun to import.
        for number in guard.ending_signals():
            signal.signal(number, lambda *_: os._exit(0))
    try:
        chosen = _parser(given).parse_args(given)
        code: int = chosen.run(chosen)
        return code
    except ValueError as error:
        if isinstance(error, UnicodeEncodeError) and error.encoding == sys.stdout.encoding != "utf-8":
            error = ValueError(f"standard output is {error.encoding}: {error}; PYTHONIOENCODING=utf-8 makes it UTF-8")
        print(f"kdtp {given[0]}: {error}", file=sys.stderr)
        return EXIT_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kdtp", description="Exact DDTree speculative decoding for MLA + MoE models.")
    parser.add_argument("--version", action="version", version=f"kdtp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        # Only the command that runs is imported: numpy alone takes longer than --help should.
        if given[:1] == [name]:
            module = _module(name)
            module.add_flags(command)
            command.set_defaults(run=module.run)
    return parser


def _module(command: str) -> ModuleType:
    if command == "generate":
        from kdtp.cli import generate

        return generate
    if command == "chat":
        from kdtp.cli import chat

        return chat
    if command == "serve":
        from kdtp.cli import serve

        return serve
    if command == "bench":
        from kdtp.cli import bench

        return bench
    if command == "engine":
        from kdtp.cli import engine

        return engine
    if command == "build-kernels":
        from kdtp.cli import build_kernels

        return build_kernels
    if command == "inspect":
        from kdtp.cli import inspect

        return inspect
    if command == "train":
        from kdtp.cli import train

        return train
    if command == "convert":
        from kdtp.cli import convert

        return convert
    from kdtp.cli import doctor

    assert command == "doctor", command
    return doctor


if __name__ == "__main__":
    sys.exit(main())
