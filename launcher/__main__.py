"""Start one lead and N ranks of any program, torchrun-style, on this machine.

    python -m launcher --nproc 2 --lead "-m some.lead --flag" -- -m some.worker --flag

Both are run by this Python interpreter. The launcher ends when they do, sees to it that none is left, and returns the
lead's exit code (1 if a rank broke the group and the lead did not say).
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile

from launcher.group import Group


def main() -> int:
    """Command line of the launcher."""
    parser = argparse.ArgumentParser(
        prog="launcher", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--nproc", type=int, required=True, help="number of ranks on this machine")
    parser.add_argument("--lead", required=True, help="the lead's arguments, as one string")
    parser.add_argument("ranks", nargs="+", help="the ranks' arguments, after --")
    chosen = parser.parse_args()
    if not 0 <= chosen.nproc <= 1024:
        parser.error(f"--nproc {chosen.nproc}: must be 0..1024")
    with tempfile.TemporaryDirectory(prefix="launcher-") as scratch:
        group = Group(shlex.split(chosen.lead), chosen.ranks, chosen.nproc, scratch, _say)
        group.start()
        return group.run()


def _say(line: str) -> None:
    print(f"launcher: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
