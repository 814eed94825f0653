"""Published checkpoints of every form against transformers: logits of every position, greedy tokens, any TP size.

The logits are in tests/refs/oracle.kdtr (scripts/gen_oracle.py); test_oracle.py holds them against transformers itself
where that is installed.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from model_cases import Ranks

from tests import hf_cases
from tests.hf_golden import TOLERANCE, Golden, check_engine


@pytest.fixture(scope="module", params=hf_cases.VARIANTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Golden]:
    path = hf_cases.write(request.param, tmp_path_factory.mktemp(request.param))
    return path, Golden(request.param)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_logits_of_every_position(case, tp, record_property):
    path, golden = case
    ranks = Ranks(path, tp)
    texts = golden.texts()
    alone = [ranks.run(i, 0, text).numpy() for i, text in enumerate(texts)]
    worst = max(float(np.abs(a - want).max()) for a, want in zip(alone, golden.logits, strict=True))
    record_property("max_abs_logit_diff", worst)
    print(f"{path.name} tp={tp}: largest difference {worst:.1e}")
    assert worst < TOLERANCE
    for prompt, tokens, found in zip(golden.prompts, golden.tokens, alone, strict=True):
        assert found[len(prompt) - 1 :].argmax(-1).tolist() == tokens.tolist()
    batch = ranks.forward(*(ranks.rows(10 + i, 0, text) for i, text in enumerate(texts)))
    assert torch.equal(batch, torch.from_numpy(np.concatenate(alone)))


def test_engine(case):
    check_engine(*case, tp=1)


@pytest.mark.parametrize("name", ["k25", "fp8"])
def test_engine_of_two_ranks(name, tmp_path):
    check_engine(hf_cases.write(name, tmp_path), Golden(name), tp=2)
