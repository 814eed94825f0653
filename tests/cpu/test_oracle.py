"""The committed logits are those of transformers, and the tests' packings those of compressed-tensors.

Runs where the `oracle` extra is installed; CI compares with the committed logits alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests import hf_cases, oracle
from tests.paths import REFS


@pytest.mark.parametrize("name", hf_cases.VARIANTS)
def test_transformers_gives_the_committed_logits(name):
    pytest.importorskip("transformers", oracle.LEAST_VERSION)
    from kdtp.model.weights import kdtr

    model = oracle.load(name)
    with kdtr.Reader(REFS / "oracle.kdtr") as reader:
        for i, prompt in enumerate(oracle.prompts(name)):
            tokens, logits = oracle.run(model, prompt)
            assert (reader.array(f"{name}.{i}.prompt") == prompt).all()
            assert (reader.array(f"{name}.{i}.tokens") == tokens).all()
            assert np.abs(reader.array(f"{name}.{i}.logits") - logits).max() < 1e-4


def test_configurations_saved_by_transformers(tmp_path):
    """Its own spelling of a file means the same model."""
    transformers = pytest.importorskip("transformers", oracle.LEAST_VERSION)
    from kdtp.model.weights import hf_config

    for name in hf_cases.VARIANTS:
        plain = hf_cases.write_plain(name, tmp_path / name)
        transformers.AutoConfig.from_pretrained(plain).save_pretrained(tmp_path / f"{name}-saved")
        saved, want = hf_config.read(tmp_path / f"{name}-saved"), hf_config.read(plain)
        assert (saved.model, saved.family, saved.tied) == (want.model, want.family, want.tied), name


def test_int4_words_are_those_of_compressed_tensors():
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    q = np.random.default_rng(0).integers(-8, 8, (6, 64), np.int8)
    assert (pack_to_int32(torch.from_numpy(q), 4).numpy() == hf_cases.words(q)).all()
