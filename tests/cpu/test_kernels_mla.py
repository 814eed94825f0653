"""Tree attention over pages: against a dense float64 softmax, and bit for bit against plain decoding."""

import math
import random

import pytest
import torch
from compare import assert_close, assert_same_bits

from kdtp import kernels
from kdtp.kernels import mla
from kdtp.spec import mask

LATENT, ROPE = 31, 6  # an odd width: most BLAS kernels have something left over
WIDTH = LATENT + ROPE
BORDERS = [0, 1, 63, 64, 65, 130]
SHAPES = ["one", "chain", "star", "random"]


@pytest.fixture(params=[1, 4])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def tree(shape, size, rng):
    parent = {"one": None, "chain": lambda i: i - 1, "star": lambda i: 0, "random": lambda i: rng.randrange(i)}[shape]
    return [-1] if shape == "one" else [-1, *(parent(i) for i in range(1, size))]


class Pool:
    """A KV pool with pages in random order, all NaN but the rows of its sequences."""

    def __init__(self, seed, dtype=torch.float32, pages=24):
        self.rng = random.Random(seed)
        self.noise = torch.Generator().manual_seed(seed)
        self.kv = torch.full((pages * 64, WIDTH), math.nan, dtype=dtype)
        self.free = self.rng.sample(range(pages), pages)

    def draw(self, *shape):
        return torch.randn(*shape, generator=self.noise).to(self.kv.dtype)

    def line(self, count):
        """Cache rows of a new sequence of `count` rows, with content."""
        pages = [self.free.pop() for _ in range(-(-count // 64))]
        line = torch.tensor([page * 64 + i for page in pages for i in range(64)])[:count]
        self.kv[line] = self.draw(count, WIDTH)
        return line


def dense(q, rows, visible, scale):
    """The definition: q [M, h, D] over rows [N, D], visible bool [M, N]."""
    rows = rows.double().where(visible.any(0)[:, None], 0)
    scores = (torch.einsum("mhd,nd->mhn", q.double(), rows) * scale).masked_fill(~visible[:, None], -math.inf)
    return torch.einsum("mhn,nd->mhd", scores.softmax(-1), rows[:, :LATENT])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("start", BORDERS)
def test_against_the_dense_mask(start, shape, dtype):
    pool = Pool(start, dtype)
    parents = tree(shape, 12, pool.rng)
    line = pool.line(start + len(parents))
    q = pool.draw(len(parents), 3, WIDTH)
    found = kernels.mla_tree(q, pool.kv, kernels.plan_keys([line], [parents]), 0.4, LATENT)
    want = dense(q, pool.kv[line], mask.dense(start, parents, len(line)), 0.4)
    assert_close(found, want, **({"atol": 3e-6} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 1e-2}))


@pytest.mark.parametrize("seed", range(4))
def test_a_ragged_batch_gives_what_its_sequences_give_alone(seed, threads):
    pool = Pool(seed)
    parents = [tree(pool.rng.choice(SHAPES), pool.rng.randint(2, 20), pool.rng) for _ in range(6)]
    lines = [pool.line(pool.rng.choice(BORDERS) + len(parent)) for parent in parents]
    queries = [pool.draw(len(parent), 3, WIDTH) for parent in parents]
    alone = [
        kernels.mla_tree(q, pool.kv, kernels.plan_keys([line], [parent]), 0.4, LATENT)
        for q, line, parent in zip(queries, lines, parents, strict=True)
    ]
    together = kernels.mla_tree(torch.cat(queries), pool.kv, kernels.plan_keys(lines, parents), 0.4, LATENT)
    assert_same_bits(together, torch.cat(alone))


@pytest.mark.parametrize("most", [1, 3, 10**6])
def test_the_memory_bound_changes_no_bit(most, monkeypatch):
    pool = Pool(7)
    parents = [tree("random", 20, pool.rng), tree("chain", 70, pool.rng), [-1]]
    lines = [pool.line(start + len(parent)) for start, parent in zip((130, 60, 5), parents, strict=True)]
    q = pool.draw(91, 2, WIDTH)
    want = kernels.mla_tree(q, pool.kv, kernels.plan_keys(lines, parents), 0.4, LATENT)
    monkeypatch.setattr(mla, "_MOST_BLOCKS", most)
    keys = kernels.plan_keys(lines, parents)
    assert (len(keys) == 1) == (most == 10**6)
    assert_same_bits(kernels.mla_tree(q, pool.kv, keys, 0.4, LATENT), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("start", BORDERS)
def test_a_node_gives_the_bits_of_plain_decoding(start, heads, dtype, threads):
    pool = Pool(start + heads, dtype)
    parents = tree("random", 30, pool.rng)
    line = pool.line(start + 30)
    q = pool.draw(30, heads, WIDTH)
    found = kernels.mla_tree(q, pool.kv, kernels.plan_keys([line], [parents]), 0.4, LATENT)
    for node in range(0, 30, 3):
        path = mask.ancestors(parents)[node].nonzero()[:, 0]
        # The same text, committed elsewhere: its rows in position order, the node as the only query.
        copy = pool.line(start + len(path))
        pool.kv[copy] = pool.kv[torch.cat([line[:start], line[start + path]])]
        alone = kernels.mla_tree(q[node : node + 1], pool.kv, kernels.plan_keys([copy], [[-1]]), 0.4, LATENT)
        assert_same_bits(found[node], alone[0])
        pool.free += sorted({int(row) // 64 for row in copy})
        pool.kv[copy] = math.nan


def test_padding_rows_come_out_zero():
    pool = Pool(0)
    line, q = pool.line(3), pool.draw(8, 2, WIDTH)
    out = kernels.mla_tree(q, pool.kv, kernels.plan_keys([line], [[-1]]), 0.4, LATENT)
    assert out[0].isfinite().all() and (out[1:] == 0).all()


def test_a_visible_nan_shows():
    # The poison of the other tests would be seen.
    pool = Pool(1)
    line = pool.line(70)
    pool.kv[line[3]] = math.nan
    out = kernels.mla_tree(pool.draw(1, 2, WIDTH), pool.kv, kernels.plan_keys([line], [[-1]]), 0.4, LATENT)
    assert out.isnan().all()


def test_more_rows_than_queries():
    pool = Pool(2)
    with pytest.raises(ValueError, match="mla_tree"):
        kernels.mla_tree(pool.draw(1, 2, WIDTH), pool.kv, kernels.plan_keys([pool.line(2)], [[-1, 0]]), 0.4, LATENT)
