"""`kdtp engine` whose workers sum one way: python -m tests.odd_engine WAY --model ... ; WAY as in tests/odd_rank.py.

It ends with who started it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kdtp import __main__
from kdtp.engine import guard
from launcher import group


class OddGroup(group.Group):
    """A group with tests.odd_rank for its ranks."""

    def __init__(self, lead: Sequence[str], ranks: Sequence[str], *rest: object) -> None:
        place = ranks[ranks.index("worker") + 1 :]
        super().__init__(lead, ["-m", "tests.odd_rank", sys.argv[1], "none", "0", *place], *rest)  # type: ignore[arg-type]


if __name__ == "__main__":
    guard.end_with_parent(os.getppid())
    group.Group = OddGroup  # type: ignore[misc]
    sys.exit(__main__.main(["engine", *sys.argv[2:]]))
