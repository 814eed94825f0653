"""What every engine must give for the checkpoints of tests.hf_cases: the tokens and logits of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from kdtp.config import DrafterConfig
from kdtp.model.weights import kdtr
from kdtp.types import SamplingParams
from tests.harness import NONE, Harness
from tests.paths import REFS

TOLERANCE = 2e-3  # found: 3e-5, and 3e-4 where the two inner norms have another epsilon than transformers gives them


class Golden:
    """Prompts of a variant, the tokens and logits that transformers gives."""

    def __init__(self, name: str) -> None:
        with kdtr.Reader(REFS / "oracle.kdtr") as reader:
            kinds = ("prompt", "tokens", "logits")
            every = [[np.array(reader.array(f"{name}.{i}.{kind}")) for kind in kinds] for i in range(3)]
        self.prompts, self.tokens, self.logits = zip(*every, strict=True)

    def texts(self) -> list[list[int]]:
        """Prompts with their continuations, but for the last token."""
        return [[*p.tolist(), *t[:-1].tolist()] for p, t in zip(self.prompts, self.tokens, strict=True)]


def check_engine(path: Path, golden: Golden, **settings: Any) -> None:
    """One by one and as a batch, by plain decoding, by a tree and by a chain."""
    harness = Harness(path, **settings)
    prompts, count = [tuple(p.tolist()) for p in golden.prompts], len(golden.tokens[0])
    known = {prompt: tuple(tokens.tolist()) for prompt, tokens in zip(prompts, golden.tokens, strict=True)}
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    tree = DrafterConfig("oracle", budget=20, hit=(0.9, 0.7), rank=2)
    try:
        for drafter in (NONE, tree, DrafterConfig("oracle", shape="chain", budget=7)):
            done = harness.run(prompts, params, drafter, known, prefill_chunk=32)
            for one, prompt, tokens, logits in zip(done, prompts, golden.tokens, golden.logits, strict=True):
                assert one.tokens == tokens.tolist()
                assert np.abs(one.logits - logits[len(prompt) - 1 :]).max() < TOLERANCE
            rounds = done[0].usage.rounds
            assert rounds == count - 1 if drafter is NONE else rounds < count - 1
    finally:
        harness.close()
