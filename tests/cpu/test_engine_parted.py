"""Ranks that part on the CPU: what gloo notices, and what only the checksum of the calls does."""

import pytest

from kdtp.model.comm import Comm, Solo
from tests import parted

pytestmark = [pytest.mark.timeout(90), pytest.mark.xdist_group("parted")]


def test_a_skipped_collective_ends_the_engine():
    assert "ended" in parted.fault_of("base", "skip", 2)


def test_a_collective_of_other_shape_and_equal_size_ends_it_too():
    assert parted.fault_of("base", "turned", 2) == "step 4: rank 1 has made other collectives than rank 0 so far"


def test_the_checksum_depends_on_every_call_and_their_order():
    def made(*calls):
        comm: Comm = Solo()
        for call in calls:
            comm.note(*call)
        return comm.made

    calls = [("sum", 1, 8), ("gather", 1, 8), ("replay", (1, 2))]
    assert made(*calls) == made(*calls) != 0
    others = [calls[:2], calls[::-1], [*calls, calls[-1]], [("sum", 8, 1), *calls[1:]]]
    assert len({made(*other) for other in [calls, *others]}) == 5
