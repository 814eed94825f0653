"""The shards against the reference: golden text and logits, and random trees on random models, for every TP size."""

import random

import numpy as np
import pytest
import torch
from compare import assert_close
from model_cases import GOLDEN, RANDOM, Ranks, write_random
from reference_cases import random_model, run

from kdtp.model.weights import kdtr
from reference.cache import Cache
from reference.config import from_metadata
from reference.model import Model

# Found: 0.9e-5 (tiny) and 1.5e-5 (v3), on logits of standard deviation 2.
ATOL = 1e-4


class Golden:
    def __init__(self, name):
        self.path = GOLDEN[name]
        self.reader = kdtr.Reader(self.path)
        self.prompt, self.tokens, self.logits = (
            self.reader.array(f"golden.{key}") for key in ("prompt", "tokens", "logits")
        )

    def model(self):
        weights = {name: self.reader.array(name) for name in self.reader.entries if not name.startswith("golden.")}
        return Model(from_metadata(self.reader.metadata), weights)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden_text_and_logits(name, tp, record_property):
    golden = Golden(name)
    ranks = Ranks(golden.path, tp)
    logits = [ranks.run(0, 0, golden.prompt, pick=1)]
    for i in range(len(golden.tokens) - 1):
        token = int(logits[-1].argmax())
        assert token == golden.tokens[i]
        logits.append(ranks.run(0, len(golden.prompt) + i, [token]))
    found, want = torch.cat(logits), torch.from_numpy(golden.logits.copy())
    record_property("max_abs_logit_diff", float((found - want).abs().max()))
    assert_close(found, want, atol=ATOL)


def random_tree(rng, size):
    return [-1, *(rng.randrange(max(0, i - 4), i) for i in range(1, size))]


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", GOLDEN)
def test_a_tree_behind_the_prompt(name, tp):
    golden, rng = Golden(name), random.Random(1)
    ranks, model = Ranks(golden.path, tp), golden.model()
    cache = Cache(model.config, len(golden.prompt) + 12)
    run(model, cache, golden.prompt, range(-1, len(golden.prompt) - 1))
    cache.commit(range(len(golden.prompt)))
    ranks.run(0, 0, golden.prompt, pick=0)
    parents, tokens = random_tree(rng, 12), rng.choices(range(model.config.vocab_size), k=12)
    found = ranks.run(0, len(golden.prompt), tokens, parents)
    assert_close(found, run(model, cache, tokens, parents), atol=ATOL)


@pytest.mark.parametrize(("name", "tp"), [("micro", 1), ("micro", 2), ("micro_v3", 1), ("grouped", 1), ("grouped", 4)])
def test_rounds_of_ragged_batches_on_random_models(name, tp, tmp_path):
    config, rng = RANDOM[name], random.Random(tp)
    model = random_model(config)
    ranks = Ranks(write_random(tmp_path / "m.kdtr", config), tp)
    caches = {seq: Cache(config, 40) for seq in range(3)}
    for _ in range(4):
        batch = rng.sample(sorted(caches), rng.randint(1, 3))
        work = []
        for seq in batch:
            size = rng.randint(1, 5)
            tokens = rng.choices(range(config.vocab_size), k=size)
            work.append((seq, caches[seq].length, tokens, random_tree(rng, size)))
        found = ranks.forward(*(ranks.rows(*rows) for rows in work))
        want = np.concatenate([run(model, caches[seq], tokens, parents) for seq, _, tokens, parents in work])
        assert_close(found, want, atol=ATOL)
        for seq, start, _, parents in work:
            kept = [0]
            while kept[-1] in parents:  # follow first children
                kept.append(parents.index(kept[-1]))
            caches[seq].commit(kept)
            ranks.commit(seq, start, kept)


@pytest.mark.parametrize("array", ["layers.1.w_kc", "layers.0.w_gate", "layers.1.experts.w_down", "embed", "head"])
def test_one_percent_in_one_weight_shows(array, tmp_path):
    config = RANDOM["micro"]
    tokens = list(range(8))
    want = Ranks(write_random(tmp_path / "a.kdtr", config)).run(0, 0, tokens)
    changed = random_model(config).weights[array] * np.float32(1.01)
    found = Ranks(write_random(tmp_path / "b.kdtr", config, **{array: changed})).run(0, 0, tokens)
    with pytest.raises(AssertionError):
        assert_close(found, want, atol=ATOL)


def test_bfloat16_is_close(tmp_path):
    config = RANDOM["micro"]
    path = write_random(tmp_path / "m.kdtr", config)
    want = Ranks(path).run(0, 0, range(20))
    for tp in (1, 2):
        found = Ranks(path, tp, "bfloat16").run(0, 0, range(20))
        assert_close(found, want, atol=0.5, cosine=0.995)
