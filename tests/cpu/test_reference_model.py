"""`forward_tokens`: prefill, decoding and trees are one function, bit for bit."""

import numpy as np
import pytest
from reference_cases import MICRO, MICRO_V3, chain_parents, random_model, run, run_text

from reference.cache import Cache

CONFIGS = pytest.mark.parametrize("config", [MICRO, MICRO_V3], ids=["plain", "v3"])


def path_to(parents, node):
    """Nodes from the root to `node`."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@CONFIGS
def test_chunks_and_single_tokens_give_the_whole(config):
    model, tokens = random_model(config), list(range(3, 17))
    want = run_text(model, tokens)
    for size in (1, 3, 5, 13):
        cache, got = Cache(config, len(tokens)), []
        for at in range(0, len(tokens), size):
            chunk = tokens[at : at + size]
            got.append(run(model, cache, chunk, chain_parents(len(chunk))))
            cache.commit(range(len(chunk)))
        assert np.concatenate(got).tobytes() == want.tobytes()


@CONFIGS
@pytest.mark.parametrize("seed", range(3))
def test_a_tree_row_is_the_row_of_its_path(config, seed):
    """Siblings share a position and never see each other; unused rows hold NaN."""
    model, random = random_model(config, seed), np.random.default_rng(seed)
    prefix = random.integers(0, config.vocab_size, 5).tolist()
    tokens = random.integers(0, config.vocab_size, 12).tolist()
    parents = [-1, *(int(random.integers(0, i)) for i in range(1, 12))]
    cache = Cache(config, 20)
    run(model, cache, prefix, chain_parents(5))
    cache.commit(range(5))
    logits = run(model, cache, tokens, parents)
    for node in range(12):
        path = path_to(parents, node)
        alone = run_text(model, prefix + [tokens[i] for i in path])
        assert logits[node].tobytes() == alone[-1].tobytes()
    # Committing the last path leaves the cache of plain decoding.
    cache.commit(path)
    plain = Cache(config, 20)
    run(model, plain, prefix + [tokens[i] for i in path], chain_parents(5 + len(path)))
    plain.commit(range(5 + len(path)))
    assert cache.rows.tobytes() == plain.rows.tobytes() and cache.length == plain.length


def test_a_mask_of_the_wrong_size_is_our_bug():
    model = random_model(MICRO)
    with pytest.raises(AssertionError):
        model.forward_tokens([1], [0], np.ones((1, 2), bool), Cache(MICRO, 4))
