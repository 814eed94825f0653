"""A drafter's own ops on a GPU are those of torch on the CPU; NaN stays where it came from.

convolve is bit-equal: both round factors and products, and add up to four taps one after another in float32. So is
gqa_prep but for the order in which a head's squares are added.
"""

from __future__ import annotations

import pytest
import torch

from kdtp import kernels

DTYPES = [torch.float32, torch.bfloat16]
STEP = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}  # of bfloat16 a rounding step, of float32 some eight
BATCHES = [(1, 1), (1, 7), (1, 8), (9, 7), (32, 8)]  # blocks, slots: 1, 7, 8, 63 and 256 rows


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def worst(found: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor) -> str | None:
    """The element that is furthest beyond what is allowed, if there is one; NaN agrees with NaN."""
    found, want = found.cpu().double(), want.double()
    beyond = ((found - want).abs() - allowed).masked_fill(found.isnan() & want.isnan(), -1.0).nan_to_num(nan=torch.inf)
    if beyond.max() <= 0:
        return None
    at = tuple(int(i) for i in torch.unravel_index(beyond.argmax(), beyond.shape))
    return f"at {list(at)}: {found[at]!r}, want {want[at]!r} within {allowed[at]!r}; {int((beyond > 0).sum())} beyond"


def alike(found: torch.Tensor, want: torch.Tensor, size: torch.Tensor) -> None:
    """Within a step of `size`, what each element is made of, and of itself; in bfloat16 nearly all to the bit."""
    assert found.dtype == want.dtype and found.shape == want.shape
    step = STEP[want.dtype]
    assert (text := worst(found, want, step * (size.double() + want.double().abs()))) is None, text
    if want.dtype == torch.bfloat16:
        unlike = int((found.cpu() != want).sum())
        assert unlike <= 2 + want.numel() // 1000, f"{unlike} of {want.numel()} are not the same"


def of_what(x: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Sizes of the two products whose sum each rotated element is."""
    x = x.float()
    first, second = (x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight).abs().chunk(2, -1)
    cos, sin = cos[:, None].abs(), sin[:, None].abs()
    return torch.cat([first * cos + second * sin, second * cos + first * sin], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 32, 64, 66, 128, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (5, 1)])
def test_gqa_prep(cuda: torch.device, heads: int, kv_heads: int, width: int, dtype: torch.dtype) -> None:
    weights = 1 + draw(width, seed=1) / 3, 1 + draw(width, seed=2) / 3
    for rows in (1, 7, 8, 63, 256):
        q, kv = draw(rows, heads, width, dtype=dtype) * 3, draw(rows, 2 * kv_heads, width, dtype=dtype)
        angles = 9 * draw(rows, width // 2)
        given = q, kv, *weights, 1e-6, angles.cos(), angles.sin()
        want, found = (kernels.gqa_prep(*(x.to(place) if isinstance(x, torch.Tensor) else x for x in given))
                       for place in ("cpu", cuda))  # fmt: skip
        alike(found[0], want[0], of_what(q, weights[0], *given[-2:]))
        keys = of_what(kv[:, :kv_heads], weights[1], *given[-2:])
        alike(found[1], want[1], torch.stack([keys, torch.zeros_like(keys)]))
        assert torch.equal(found[1][1].cpu(), kv[:, kv_heads:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("taps", [1, 2, 3, 4])
@pytest.mark.parametrize(("width", "groups"), [(256, 16), (64, 1), (40, 40), (33, 11)])
def test_convolve(cuda: torch.device, width: int, groups: int, taps: int, dtype: torch.dtype) -> None:
    base = draw(2, taps, width, dtype=dtype)
    for blocks, n in BATCHES:
        x = draw(blocks * n, width, dtype=dtype)
        dynamic = draw(blocks * n, 2 * taps * groups, dtype=dtype)
        for side in (0, 1):
            want = kernels.convolve(x, dynamic, base, side, n)
            found = kernels.convolve(x.to(cuda), dynamic.to(cuda), base.to(cuda), side, n)
            assert (text := worst(found, want, torch.zeros_like(want).double())) is None, text


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_row(cuda: torch.device, dtype: torch.dtype) -> None:
    """And of a block in the slots that see it."""
    q, kv = draw(9, 4, 64, dtype=dtype).to(cuda), draw(9, 4, 64, dtype=dtype).to(cuda)
    weight, angles = torch.ones(64, device=cuda), draw(9, 32).to(cuda)
    q[4], kv[4] = torch.nan, torch.nan
    queries, both = kernels.gqa_prep(q, kv, weight, weight, 1e-6, angles.cos(), angles.sin())
    for broken in (queries.isnan(), both[0].isnan(), both[1].isnan()):
        assert broken[4].all() and not broken[[0, 1, 2, 3, 5, 6, 7, 8]].any()
    x, dynamic, base = draw(12, 64, dtype=dtype), draw(12, 2 * 3 * 8, dtype=dtype), draw(2, 3, 64, dtype=dtype)
    x[6], x[3] = torch.nan, torch.nan  # of blocks of 4: slot 2 of the second, the last slot of the first
    broken = kernels.convolve(x.to(cuda), dynamic.to(cuda), base.to(cuda), 0, 4).isnan()
    assert broken.all(1).tolist() == broken.any(1).tolist() == [i in (3, 6, 7) for i in range(12)]
