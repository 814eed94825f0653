"""Loading: each rank's slices, and refusals that name file, array, expected and found."""

import re

import numpy as np
import pytest
import torch
from compare import assert_same_bits
from model_cases import GOLDEN, RANDOM, write_random
from reference_cases import random_model

from kdtp.config import ModelConfig
from kdtp.model.comm import Solo
from kdtp.model.shard import Shard
from kdtp.model.weights import kdtr
from kdtp.model.weights.load import Weights, open_model
from kdtp.model.weights.table import parameters, span


def ignore(done, total):
    pass


def load(path, rank=0, size=1, dtype="float32"):
    return Weights(open_model(path), rank, size, dtype, ignore)


@pytest.mark.parametrize("name", RANDOM)
def test_parts_make_the_whole(name, tmp_path):
    path = write_random(tmp_path / "m.kdtr", RANDOM[name])
    arrays = random_model(RANDOM[name]).weights
    for size in load(path).config.legal_tp():
        ranks = [load(path, rank, size) for rank in range(size)]
        for key, param in parameters(ranks[0].config).items():
            parts = [rank.take(key) for rank in ranks]
            whole = parts[0] if param.axis is None else torch.cat(parts, param.axis)
            assert_same_bits(whole, torch.from_numpy(arrays[key]))


@pytest.mark.parametrize(("width", "size"), [(12, 4), (13, 4), (5, 4), (1, 3), (512, 7)])
def test_spans_tile_the_width(width, size):
    spans = [span(width, rank, size) for rank in range(size)]
    assert [i for a, b in spans for i in range(a, b)] == list(range(width))
    assert spans[0][1] - spans[0][0] == -(-width // size)


def test_what_stays_float32(tmp_path):
    weights = load(write_random(tmp_path / "m.kdtr", RANDOM["micro_v3"]), dtype="bfloat16")
    exact = {name for name in parameters(weights.config) if weights.take(name).dtype == torch.float32}
    kinds = {name.rsplit(".", 1)[-1] for name in exact}
    assert kinds == {"attn_norm", "mlp_norm", "q_a_norm", "kv_a_norm", "final_norm", "router", "router_bias"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": None}, r"array 'head': want float32 \[16, 61\], found none"),
        ({"surplus": np.zeros(3)}, r"array 'surplus' is no parameter of this model \(1 such\)"),
        ({"final_norm": np.zeros(17, np.float32)}, r"'final_norm': want float32 \[16\], found float32 \[17\]"),
        ({"final_norm": np.zeros(16)}, r"'final_norm': want float32 \[16\], found float64 \[16\]"),
        ({"layers.0.router": np.zeros((16, 4), np.float32)}, "'layers.0.router' is no parameter"),
    ],
)
def test_wrong_arrays(changes, message, tmp_path):
    path = write_random(tmp_path / "m.kdtr", RANDOM["micro"], **changes)
    with pytest.raises(ValueError, match=re.escape(str(path)) + ": .*" + message):
        load(path)


def test_golden_arrays_are_no_parameters(tmp_path):
    load(write_random(tmp_path / "m.kdtr", RANDOM["micro"], **{"golden.prompt": np.zeros(3, np.int64)}))


def test_not_a_model(tmp_path):
    path = tmp_path / "m.kdtr"
    kdtr.write(path, {"format": "kdtp-drafter"}, {})
    with pytest.raises(ValueError, match=r"m\.kdtr: format: want 'kdtp-model', found 'kdtp-drafter'"):
        load(path)


def test_illegal_sizes_and_dtypes(tmp_path):
    path = write_random(tmp_path / "m.kdtr", RANDOM["grouped"])
    with pytest.raises(ValueError, match=r"tp = 3: .*m\.kdtr can be split over \[1, 2, 4\] ranks"):
        load(path, 0, 3)
    with pytest.raises(ValueError, match="dtype = 'float16': must be one of float32, bfloat16"):
        load(path, dtype="float16")


def test_progress_ends_at_the_total_and_can_stop(tmp_path):
    seen = []
    Shard.load(str(GOLDEN["model_tiny"]), Solo(), "float32", 1, lambda done, total: seen.append((done, total)))
    done, totals = [d for d, _ in seen], {t for _, t in seen}
    assert done == sorted(set(done)) and totals == {done[-1]}

    def stop(done, total):
        raise InterruptedError

    with pytest.raises(InterruptedError):
        Shard.load(str(GOLDEN["model_tiny"]), Solo(), "float32", 1, stop)


def test_the_hash_knows_weights_and_configuration(tmp_path):
    config = RANDOM["micro"]
    head = random_model(config).weights["head"].copy()
    head[3, 3] += 1
    files = [
        write_random(tmp_path / "a", config),
        write_random(tmp_path / "b", config),
        write_random(tmp_path / "c", config, head=head),
        write_random(tmp_path / "d", RANDOM["micro_v3"]),
    ]
    hashes = [load(path).model_hash for path in files]
    assert hashes[0] == hashes[1] == load(files[0], 1, 2).model_hash
    assert len(set(hashes)) == 3


def test_the_table_counts_every_golden_array():
    for path in GOLDEN.values():
        reader = kdtr.Reader(path)
        found = {name: entry.shape for name, entry in reader.entries.items() if not name.startswith("golden.")}
        table = parameters(ModelConfig.from_metadata(reader.metadata, str(path)))
        assert found == {name: param.shape for name, param in table.items()}
