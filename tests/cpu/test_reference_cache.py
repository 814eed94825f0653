"""Compaction after a verify, for every set of kept rows."""

from itertools import combinations

import numpy as np
import pytest
from reference_cases import MICRO

from reference.cache import Cache

DRAFTED, COMMITTED = 6, 3


def filled() -> Cache:
    """A cache with 3 committed rows and 6 behind them, all distinct."""
    cache = Cache(MICRO, 12)
    rows = np.arange(MICRO.num_hidden_layers * 9 * MICRO.kv_row, dtype=np.float32)
    cache.rows[:, :9] = rows.reshape(MICRO.num_hidden_layers, 9, MICRO.kv_row)
    cache.length = COMMITTED
    return cache


@pytest.mark.parametrize("count", range(1, DRAFTED + 1))
def test_every_path(count):
    for kept in combinations(range(DRAFTED), count):
        cache, before = filled(), filled().rows
        cache.commit(kept)
        assert cache.length == COMMITTED + count
        np.testing.assert_array_equal(cache.rows[:, :COMMITTED], before[:, :COMMITTED])
        moved = before[:, [COMMITTED + row for row in kept]]
        np.testing.assert_array_equal(cache.rows[:, COMMITTED : cache.length], moved)
        assert np.isnan(cache.rows[:, cache.length :]).all()


def test_write_goes_behind_the_committed_rows():
    cache, rows = filled(), np.full((2, MICRO.kv_row), 7, np.float32)
    seen = cache.write(1, rows)
    assert seen.shape == (COMMITTED + 2, MICRO.kv_row)
    assert (seen[COMMITTED:] == 7).all() and (cache.rows[0] != 7).any() and cache.length == COMMITTED


def test_a_full_cache_says_so():
    with pytest.raises(ValueError, match="13 rows in a cache of 12"):
        filled().write(0, np.zeros((10, MICRO.kv_row), np.float32))
