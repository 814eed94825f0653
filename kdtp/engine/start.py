"""The first lines of a child of the launcher: tied to it before torch is imported, which takes seconds.

python -m kdtp.engine.start PARENT-PID host|worker ARGUMENTS
"""

from __future__ import annotations

import sys

from kdtp.engine import guard


def main() -> int:
    """Run the role; it ends when the launcher does."""
    parent, role, *arguments = sys.argv[1:]
    guard.end_with_parent(int(parent))
    guard.dump_stacks_on_signal()
    if role == "host":
        from kdtp.engine import host

        return host.main(arguments)
    assert role == "worker", role
    from kdtp.engine import worker

    return worker.main(arguments)


if __name__ == "__main__":
    guard.leave(main())
