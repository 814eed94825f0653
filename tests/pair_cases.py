"""The pair that ships, on ranks that are loaded: prompts, ways to speculate, and what must hold of all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from kdtp import pair
from kdtp.config import DrafterConfig
from kdtp.text import tokenizer
from kdtp.types import SamplingParams
from tests.harness import NONE, Done, Harness

TEXTS = (
    "import os\n\ndef find_files(folder, suffix):\n    files = os.listdir(folder)\n    for",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n    def __repr__(self):",
    "x",
)
WAYS: Mapping[str, dict[str, object]] = {
    "budget 0": {"budget": 0},
    "budget 4": {"budget": 4},
    "budget 16": {"budget": 16},
    "budget 64": {"budget": 64},
    "chain": {"shape": "chain"},
    "seeded": {"shape": "seeded"},
    "merged": {"name": "dflash+ngram", "budget": 24},
    "ngram": {"name": "ngram", "model": ""},
}


def prompts() -> list[list[int]]:
    """TEXTS in tokens."""
    codec = tokenizer.load(pair.TARGET)
    return [[*codec.begin, *codec.encode(text)] for text in TEXTS]


def harness(tp: int = 1, **settings: object) -> Harness:
    """The pair on `tp` ranks."""
    return Harness(pair.TARGET, tp, drafter=DrafterConfig("dflash", model=pair.NAME), **settings)


def per_round(done: list[Done]) -> float:
    """Tokens committed per round, of all texts."""
    return sum(d.usage.committed for d in done) / sum(d.usage.rounds for d in done)


def check(ranks: Harness, temperature: float, ways: Iterable[str] = WAYS, tokens: int = 24) -> dict[str, float]:
    """Text and logits of these ways are those of plain decoding, bit for bit -> tokens per round, by way."""
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=5, ignore_eos=True)
    plain = ranks.run(prompts(), params, NONE)
    found = {}
    for way in ways:
        drafter = dataclasses.replace(ranks.config.drafter, **WAYS[way])  # type: ignore[arg-type]
        done = ranks.run(prompts(), params, drafter, prefill_chunk=16, max_batch=2)
        for got, want in zip(done, plain, strict=True):
            assert got.tokens == want.tokens and got.logits.tobytes() == want.logits.tobytes(), way
        found[way] = per_round(done)
    return found
