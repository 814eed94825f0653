"""Two layers of Kimi K2 at true width in bfloat16 against transformers in float32, with transformers' own bfloat16
beside it: what is left is rounding, and no more of it than the field's own implementation has.

Where an expert is chosen by less than the rounding, an engine in bfloat16 takes another one. Positions are counted
apart, so that the median is of those that chose alike, and the rest is shown.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kdtp.model.comm import Solo
from kdtp.model.moe import Int4Experts
from kdtp.model.shard import Shard
from kdtp.model.weights.load import Weights, open_model
from kdtp.types import SeqRows
from tests import k2_slice

LENGTH = 192


def relative(found: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Of each position."""
    return np.linalg.norm(found - want, axis=-1) / np.linalg.norm(want, axis=-1)


def ours(path, text: list[int]) -> tuple[np.ndarray, Shard]:
    with open_model(path) as source:
        device = torch.device("cuda")
        shard = Shard(Weights(source, 0, 1, "bfloat16", lambda done, total: None, device), Solo(), 4)
    rows = SeqRows(0, 0, tuple(text), tuple(range(-1, len(text) - 1)), len(text), new_pages=(2, 0, 3))
    return shard.forward_tokens([rows]).cpu().numpy(), shard


@pytest.mark.timeout(600)
@pytest.mark.parametrize("int4", [False, True], ids=["bfloat16", "int4"])
def test_true_width(int4, tmp_path, capsys):
    pytest.importorskip("transformers", "5.0")
    part = k2_slice.Slice(k2_slice.CONFIG, int4, torch.device("cuda"))
    text = random.Random(3).choices(range(k2_slice.CONFIG["vocab_size"]), k=LENGTH)
    found, shard = ours(part.write(tmp_path), text)
    assert isinstance(shard._layers[1].mlp.experts, Int4Experts) == int4
    del shard
    want, theirs = (k2_slice.logits(part.reference(dtype), text) for dtype in (torch.float32, torch.bfloat16))
    error, their_error = relative(found, want), relative(theirs, want)
    with capsys.disabled():
        for name, e in (("kdtp", error), ("transformers", their_error)):
            figures = ", ".join(f"{q}% {np.percentile(e, q):.4f}" for q in (10, 50, 90, 99))
            print(f"K2 slice, {'INT4 experts' if int4 else 'bfloat16'}, {name} in bfloat16: relative error {figures}")
        same = (found.argmax(-1) == want.argmax(-1)).mean(), (theirs.argmax(-1) == want.argmax(-1)).mean()
        print(f"greedy tokens of the float32 reference: kdtp {same[0]:.1%}, transformers {same[1]:.1%}")
    assert np.median(error) < 0.03
    assert np.median(error) < 1.25 * np.median(their_error) + 1e-3
    assert np.percentile(error, 90) < 1.5 * np.percentile(their_error, 90) + 5e-3
