"""The pushed all-reduce between GPUs: bits of eager calls and replays, other shapes, a rank that has ended."""

from __future__ import annotations

import pytest

from kdtp.model.push import MOST, SIZES
from tests import reduce_ranks


@pytest.fixture(scope="module")
def found(gpus: int, tmp_path_factory: pytest.TempPathFactory) -> reduce_ranks.Found:
    """Of a process per GPU."""
    return reduce_ranks.run(gpus, "nccl", tmp_path_factory.mktemp("ranks"), 100)


@pytest.mark.parametrize("task", ["eager", "replayed"])
def test_sums_are_alike(found: reduce_ranks.Found, task: str) -> None:
    reduce_ranks.check_sums(found, task)


def test_another_shape_is_found_out(found: reduce_ranks.Found) -> None:
    reduce_ranks.check_unlike(found)


def test_a_rank_that_has_ended_is_named(found: reduce_ranks.Found) -> None:
    reduce_ranks.check_gone(found)


def test_ranks_choose_alike(found: reduce_ranks.Found) -> None:
    chosen = {rank["probed"] for rank in found}
    assert len(chosen) == 1
    assert chosen <= {0, *SIZES} and SIZES[-1] == MOST
