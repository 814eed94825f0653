"""Every kernel case, room by room: one test runs all cases of its room and names each that fails."""

from __future__ import annotations

import pytest

from tests.gpu import rooms
from tests.gpu.running import complaints


@pytest.mark.timeout(600)
@pytest.mark.parametrize("room", rooms.names())
def test_room(room: str) -> None:
    count, failed = 0, []
    for case in rooms.cases(room):
        count += 1
        try:
            if found := complaints(case):
                failed.append("\n    ".join([case.name, *found]))
        except Exception as error:  # a fault of the device, say: no later case can run
            error.add_note(f"in case {case.name}")
            for text in failed:
                error.add_note(f"before it: {text}")
            raise
    assert count, "no cases"
    assert not failed, "\n".join([f"{len(failed)} of {count} cases failed:", *failed])
