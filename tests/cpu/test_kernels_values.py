"""Each op against its definition in float64, written again."""

import itertools
import math

import pytest
import torch
from compare import assert_close, assert_same_bits

from kdtp import kernels

# One bfloat16 rounding of the result, and of what goes in between.
TOLERANCE = {torch.float32: {"atol": 2e-6, "rtol": 2e-6}, torch.bfloat16: {"atol": 1e-2, "rtol": 1e-2}}
DTYPES = list(TOLERANCE)


def draw(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 7, 8, 9, 24])
def test_linear(rows, dtype):
    x, w = draw(rows, 37, dtype=dtype), draw(37, 53, dtype=dtype) / 6
    assert_close(kernels.linear(x, w), x.double() @ w.double(), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 8, 17])
def test_linear_heads(rows, dtype):
    x, w = draw(rows, 3, 25, dtype=dtype)[..., :20], draw(3, 20, 11, dtype=dtype) / 5
    want = torch.stack([x[:, i].double() @ w[i].double() for i in range(3)], 1)
    assert_close(kernels.linear_heads(x, w), want, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype):
    x, residual, weight = draw(5, 31, dtype=dtype), draw(5, 31, dtype=dtype, seed=1), draw(31)
    total = x + residual
    want = total.double() / (total.double().square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
    found_total, found = kernels.add_rms_norm(x, residual, weight, 0.1)
    assert_same_bits(found_total, total)
    assert_close(found, want, **TOLERANCE[dtype])
    assert_same_bits(kernels.rms_norm(total, weight, 0.1), found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_turns_pairs_in_the_complex_plane(dtype):
    x, angles = draw(4, 3, 10, dtype=dtype), draw(4, 1, 5).double()
    cos, sin = angles.cos().float(), angles.sin().float()
    turned = torch.complex(x[..., :5].double(), x[..., 5:].double()) * torch.polar(torch.ones_like(angles), angles)
    found = kernels.rope(x, torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1))
    assert_close(found, torch.cat([turned.real, turned.imag], -1), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype):
    x = draw(3, 26, dtype=dtype) * 4
    gate, up = x.double().chunk(2, -1)
    assert_close(kernels.silu_mul(x), gate / (1 + (-gate).exp()) * up, **TOLERANCE[dtype])


def test_embedding_shards_add_up():
    table, ids = draw(11, 6), torch.tensor([0, 10, 4, 4, 7])
    shards = [kernels.embedding(ids, table[a:b], a) for a, b in ((0, 4), (4, 8), (8, 11), (11, 11))]
    assert_same_bits(sum(shards), table[ids])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "padded"), [(1, 8), (3, 3), (20, 24)])
def test_moe(rows, padded, dtype):
    x, gate_up, down = draw(padded, 12, dtype=dtype), draw(5, 12, 14, dtype=dtype) / 3, draw(5, 7, 12, dtype=dtype) / 3
    ids = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i))[:3] for i in range(rows)])
    weights = draw(rows, 3).abs()
    want = torch.zeros(padded, 12, dtype=torch.float64)
    for row, choice in itertools.product(range(rows), range(3)):
        gate, up = (x[row].double() @ gate_up[ids[row, choice]].double()).chunk(2)
        inner = gate / (1 + (-gate).exp()) * up
        want[row] += weights[row, choice] * (inner @ down[ids[row, choice]].double())
    tolerance = {"atol": 3e-2, "rtol": 3e-2} if dtype == torch.bfloat16 else TOLERANCE[dtype]  # three roundings
    assert_close(kernels.moe(x, ids, weights, gate_up, down), want, **tolerance)


@pytest.mark.parametrize("kept", [k for n in range(1, 6) for k in itertools.combinations(range(5), n)])
def test_kv_move_for_every_overlap(kept):
    kv = draw(2, 9, 3)
    source, target = torch.tensor(kept) + 2, torch.arange(len(kept)) + 2
    before = kv.clone()
    kernels.kv_move(kv, source, target, torch.tensor([0, len(kept)], dtype=torch.int32))
    assert_same_bits(kv[:, target], before[:, source])
    others = [row for row in range(9) if row not in target.tolist()]
    assert_same_bits(kv[:, others], before[:, others])


def test_kv_move_reads_all_sources_first():
    # A cycle, which no order of single copies gives.
    kv = torch.arange(4.0).view(1, 4, 1).clone()
    kernels.kv_move(kv, torch.tensor([1, 2, 0]), torch.tensor([0, 1, 2]), torch.tensor([0, 3], dtype=torch.int32))
    assert kv.flatten().tolist() == [1, 2, 0, 3]


def test_kv_write():
    kv, new = torch.full((6, 2), math.nan), draw(2, 2)
    kernels.kv_write(kv, torch.tensor([4, 1]), new)
    assert_same_bits(kv[[4, 1]], new)
    assert kv[[0, 2, 3, 5]].isnan().all()


def best(row, k):
    """(logit descending, id ascending), by Python's sort."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
    log_z = math.log(math.fsum(math.exp(v) for v in row))
    return order, [row[i] - log_z for i in order]


@pytest.mark.parametrize("k", [1, 2, 5, 11, 40])
def test_topk_with_many_ties(k):
    logits = torch.randint(-2, 3, (30, 11), generator=torch.Generator().manual_seed(k)).float()
    logits[3, ::2] = -math.inf
    lp, ids = kernels.topk_logsumexp(logits, k)
    for row in range(30):
        want_ids, want_lp = best(logits[row].tolist(), k)
        assert ids[row].tolist() == want_ids
        assert_close(lp[row], torch.tensor(want_lp), atol=1e-6)


def test_topk_of_shards_merges_to_the_topk_of_the_row():
    logits = torch.randint(-9, 9, (8, 60), generator=torch.Generator().manual_seed(0)).float()
    want_lp, want_ids = kernels.topk_logsumexp(logits, 7)
    parts = []
    for first in range(0, 60, 20):
        lp, ids = kernels.topk_logsumexp(logits[:, first : first + 20].contiguous(), 7)
        parts.append((lp + logits[:, first : first + 20].logsumexp(-1, keepdim=True), ids + first))
    values, ids = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    # Shards come in the order of ids, each with lower ids first among equals: a stable sort keeps that.
    order = values.round(decimals=3).sort(descending=True, stable=True).indices[:, :7]
    assert_same_bits(ids.gather(1, order), want_ids)
    assert_close(values.gather(1, order) - logits.logsumexp(-1, keepdim=True), want_lp, atol=1e-5)


def test_topk_of_unusable_rows():
    logits = draw(4, 6)
    logits[0, 3] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    lp, ids = kernels.topk_logsumexp(logits, 3)
    assert lp[:2].isnan().all()
    assert (lp[2] == -math.inf).all()
    assert ids[2].tolist() == [0, 1, 2]
    assert lp[3].isfinite().all()
    assert ((ids >= 0) & (ids < 6)).all()


def test_topk_log_probabilities_never_exceed_zero():
    logits = torch.tensor([[80.0, -80.0, -90.0]]) + torch.linspace(-5, 5, 1001)[:, None]
    assert (kernels.topk_logsumexp(logits, 1)[0] <= 0).all()
