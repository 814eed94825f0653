"""The whole engine, sampled with drafts, against the target's law, enumerated by the numpy model.

Many requests of one prompt, one seed each; chi-square of their first tokens, taken together. And a walk that accepts
too much is seen by it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from model_cases import RANDOM, write_random
from reference_cases import random_model, run_text

from kdtp.spec import accept
from kdtp.types import Path, SamplingParams
from tests.dflash import Loaded

pytestmark = [pytest.mark.timeout(120), pytest.mark.xdist_group("sampling-law")]
CONFIG = dataclasses.replace(RANDOM["micro"], vocab_size=8)
PROMPT = (3, 1, 4, 1, 0, 2)
TOKENS = 3
DRAWS = 600


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("law")
    made = Loaded(folder, write_random(folder / "m.kdtr", CONFIG))
    yield made
    made.close()


def step(logits: np.ndarray, temperature: float, top_k: int = 0) -> np.ndarray:
    """The law of one token."""
    kept = np.sort(logits)[-top_k] if top_k else -math.inf
    weights = np.where(logits >= kept, np.exp((logits - logits.max()) / temperature), 0.0)
    return weights / weights.sum()


@functools.cache
def rows(tokens: tuple[int, ...]) -> np.ndarray:
    """Logits of the numpy model for each of TOKENS tokens, of which all but the last are these."""
    return run_text(random_model(CONFIG), PROMPT + tokens).astype(np.float64)[-TOKENS:]


def law(**rule) -> dict[tuple[int, ...], float]:
    """The probability of each beginning of TOKENS tokens."""
    found = {}
    for text in itertools.product(range(CONFIG.vocab_size), repeat=TOKENS):
        steps = zip(rows(text[:-1]), text, strict=True)
        found[text] = math.prod(float(step(row, **rule)[t]) for row, t in steps)
    assert abs(sum(found.values()) - 1) < 1e-9
    return found


def draws(loaded: Loaded, drafter, count: int, **rule) -> tuple[list[tuple[int, ...]], int]:
    """The first tokens of `count` seeds, and how many drafts were accepted."""
    params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, seed=seed, **rule) for seed in range(count)]
    done = loaded.harness(drafter).run([PROMPT] * count, params, drafter, max_batch=128, max_queue=count)
    return [tuple(d.tokens) for d in done], sum(sum(d.usage.accepted_by_depth) for d in done)


def excess(texts: list[tuple[int, ...]], want: dict[tuple[int, ...], float]) -> float:
    """Chi-square in units of its 99.9 % quantile (Wilson-Hilferty): above 1 the law is rejected. Beginnings that are
    expected fewer than 5 times are one."""
    count = dict.fromkeys(want, 0)
    for text in texts:
        count[text] += 1
    assert all(want[text] > 0 for text in texts), "a token that the rule drops was drawn"
    often = [text for text in want if want[text] * len(texts) >= 5]
    cells = [(count[text], want[text] * len(texts)) for text in often]
    rest = len(texts) - sum(expected for _, expected in cells)
    if rest >= 5:
        cells.append((len(texts) - sum(seen for seen, _ in cells), rest))
    df = len(cells) - 1
    assert df >= 10
    chi = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    return chi / (df * (1 - 2 / (9 * df) + 3.09 * (2 / (9 * df)) ** 0.5) ** 3)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [({}, {"temperature": 1.0}), ({"name": "dflash+ngram"}, {"temperature": 0.7, "top_k": 3})],
    ids=["tree", "merged"],
)
def test_sampled_text_has_the_targets_law(loaded, rule, changes):
    texts, accepted = draws(loaded, loaded.settings("v1", topk=8, budget=8, **changes), DRAWS, **rule)
    assert accepted > DRAWS // 10, accepted
    assert excess(texts, law(**rule)) < 1
    hotter = rule | {"temperature": rule["temperature"] * 1.5}
    assert excess(texts, law(**hotter)) > 1.5  # a temperature that is half off would show


def test_a_walk_that_accepts_too_much_is_seen(loaded, monkeypatch):
    """In one of three rounds the first candidate is taken whatever the target says: what lossy acceptance does."""
    walk, rounds = accept.walk, itertools.count()

    def lossy(tree, ids):
        if next(rounds) % 3 or len(tree.tokens) < 2:
            return walk(tree, ids)
        return Path((0, 1), ids[1])

    monkeypatch.setattr(accept, "walk", lossy)
    texts, _ = draws(loaded, loaded.settings("v1", topk=8, budget=8), DRAWS, temperature=1.0)
    assert excess(texts, law(temperature=1.0)) > 1.5
