"""Page tables: append-only, one owner per page, and an error that names sequence and page."""

import pytest
import torch
from model_cases import RANDOM

from kdtp.model.cache import PagedCache
from kdtp.types import Move

CONFIG = RANDOM["micro"]


def cache(poison=False):
    return PagedCache(CONFIG, 6, torch.float32, poison)


def test_rows_follow_the_table():
    c = cache()
    c.append(7, [3])
    c.append(7, [])
    c.append(7, [0, 5])
    want = [*range(192, 256), *range(64), *range(320, 384)]
    assert c.line(7, 192).tolist() == want
    assert c.line(7, 70).tolist() == want[:70]
    assert c.places(7, 0, 192) == want and c.places(7, 63, 2) == want[63:65] and c.places(7, 192, 0) == []


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([6], r"sequence 2: page 6 is not one of 0\.\.5"),
        ([-1], r"sequence 2: page -1 is not one of 0\.\.5"),
        ([4, 1], "sequence 2: page 1 already belongs to sequence 1"),
        ([4, 4], "sequence 2: page 4 already belongs to sequence 2"),
    ],
)
def test_refused_pages_leave_no_trace(pages, message):
    c = cache()
    c.append(1, [1])
    with pytest.raises(RuntimeError, match=message):
        c.append(2, pages)
    c.append(3, [0, 2, 3, 4, 5])
    with pytest.raises(RuntimeError, match="sequence 2 has no page table"):
        c.line(2, 0)


def test_rows_beyond_the_table():
    c = cache()
    c.append(1, [1])
    with pytest.raises(RuntimeError, match="sequence 1: row 64 lies beyond its 64 rows"):
        c.line(1, 65)
    with pytest.raises(RuntimeError, match="sequence 1: row 65 lies beyond its 64 rows"):
        c.places(1, 64, 2)
    with pytest.raises(RuntimeError, match="sequence 1: row 64 lies beyond"):
        c.move([Move(1, 60, (0, 4))])
    with pytest.raises(RuntimeError, match="sequence 9 has no page table"):
        c.release([9])


def test_released_pages_are_free_and_empty():
    c = cache(poison=True)
    c.append(1, [2, 4])
    c.append(2, [3])
    c.kv[:] = 1.0
    c.release([1])
    c.append(5, [4, 2])
    assert c.kv[:, c.line(5, 128)].isnan().all()
    assert (c.kv[:, c.line(2, 64)] == 1).all()
    with pytest.raises(RuntimeError, match="sequence 1 has no"):
        c.line(1, 1)


def test_moves_over_a_page_border_in_all_layers():
    c = cache(poison=True)
    c.append(1, [5, 0])
    line = c.line(1, 128)
    c.kv[:, line] = torch.arange(128.0)[:, None].expand(CONFIG.num_hidden_layers, 128, CONFIG.kv_row)
    c.append(2, [3, 1])
    other = c.line(2, 128)
    c.kv[:, other] = torch.arange(1000.0, 1128.0)[:, None].expand(CONFIG.num_hidden_layers, 128, CONFIG.kv_row)
    c.move([Move(1, 61, (0, 2, 3, 7)), Move(2, 62, (0, 1, 4))])
    found, others = c.kv[:, line], c.kv[:, other]
    assert (found[:, :65, 0] == torch.tensor([*range(61), 61, 63, 64, 68]).float()).all()
    assert found[:, 65:].isnan().all()
    assert (others[:, :65, 0] == 1000.0 + torch.tensor([*range(64), 66]).float()).all() and others[:, 65:].isnan().all()


def test_committed_pages_may_be_shared_and_are_then_read_only():
    c = cache(poison=True)
    c.append(1, [3, 1])
    c.kv[:] = 1.0
    c.append(2, [3, 4], start=64)  # begins behind page 3
    assert (c.kv[:, c.line(2, 64)] == 1).all() and c.kv[:, c.line(2, 128)[64:]].isnan().all()
    with pytest.raises(RuntimeError, match="sequence 2: row 63 is shared, as are all before 64"):
        c.append(2, [], start=63)
    with pytest.raises(RuntimeError, match="sequence 3: page 3 already belongs to sequence 1"):
        c.append(3, [0, 3], start=64)  # its second page is one it will write to
    with pytest.raises(RuntimeError, match="sequence 3: page 3 already belongs to sequence 3"):
        c.append(3, [3, 3], start=128)
    c.release([1])
    with pytest.raises(RuntimeError, match="sequence 4: page 3 already belongs to sequence 2"):
        c.append(4, [3])
    c.release([2])
    c.append(4, [3, 0], start=64)  # what a page holds outlives those who held it
    assert (c.kv[:, c.line(4, 64)] == 1).all()
