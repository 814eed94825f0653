"""Command line of kdtp."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from kdtp.cli import doctor, engine, generate, inspect
from kdtp.version import __version__

EXIT_INPUT = 2  # bad flag, file or value
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Bad input is one line on stderr and exit code 2."""
    parser = argparse.ArgumentParser(prog="kdtp", description="Exact DDTree speculative decoding for MLA + MoE models.")
    parser.add_argument("--version", action="version", version=f"kdtp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (generate, engine, inspect, doctor):
        module.add_parser(commands)
    chosen = parser.parse_args(arguments)
    try:
        code: int = chosen.run(chosen)
        return code
    except ValueError as error:
        print(f"kdtp {chosen.command}: {error}", file=sys.stderr)
        return EXIT_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
