"""The load benchmark, on small checkpoints: what it writes loads, and a rank takes its shard and little more."""

from __future__ import annotations

import pytest

from scripts import bench_load


@pytest.mark.parametrize(("form", "tp"), [("bf16", 2), ("int4", 1)])
def test_memory_of_a_rank_is_its_shard_and_a_piece(form, tp, tmp_path):
    size = bench_load.write(tmp_path, form, 0.2, 1024)
    assert 0.2e9 <= size < 0.4e9
    bench_load.forget(tmp_path)
    for rank in bench_load.load(tmp_path, tp, "bfloat16", "cpu"):
        assert size / tp * 0.98 < rank["read"] < size / tp * 1.1
        extra = rank["peak"] - rank["before"] - rank["kept"]
        print(f"{form} tp={tp}: kept {rank['kept'] / 1e6:.0f} MB, {extra / 1e6:.0f} MB beside it")
        assert rank["files"] < 80e6  # a mapping that is kept would have the whole shard
        assert extra < 130e6  # of which 70 MB are torch's own, whatever is loaded
