"""The one way a token is chosen from logits that its rule has edited: prefill, plain decoding, chain and tree.

Greedy is a real argmax, the lowest id among equal maxima. Sampling is argmax(logit / T + noise) over the ids that the
filters keep, with Gumbel noise that is a function of (request seed, absolute position of the token, token id). What is
chosen at a prefix is therefore the same whatever tree or batch it was verified in. Rows of one position share their
noise; only one of them is on the path, so the law is the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kdtp.types import NO_TOKEN, Rule

_WORD = 0xFFFFFFFF


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The largest of each row of [R, V], the lowest id among equals: int64 [R].

    NO_TOKEN for a row whose maximum is not finite (a NaN anywhere makes it NaN): its request fails, the others go on.
    """
    return _or_no_token(*logits.max(dim=1))  # torch promises the first index among equals


def local_argmax(logits: torch.Tensor, vocab_start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a vocabulary shard [R, V/N] gives to `merge_argmax`: each row's maximum and its lowest global id, both [R].

    Nothing is checked here, for a shard may consist of padding (-inf).
    """
    values, ids = logits.max(dim=1)
    return values, ids + vocab_start


def merge_argmax(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The `argmax` over N shards of the vocabulary, from their maxima and global ids, both [N, R]: int64 [R]."""
    top = values.amax(dim=0)
    lowest = torch.where(values == top, ids, torch.iinfo(torch.int64).max).amin(dim=0)
    return _or_no_token(top, lowest)


def _or_no_token(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    # isfinite takes twice as long: it is made of four ops.
    return torch.where(values.abs() < math.inf, ids, NO_TOKEN)


def sample(logits: torch.Tensor, positions: Sequence[int], rules: Sequence[Rule]) -> torch.Tensor:
    """One token for each row of float32 [R, V] by its own rule: int64 [R].

    positions [R]: absolute position of the token being chosen, which is the row's own position + 1.
    Filters act in the order top_k, top_p, min_p, each on what the one before kept. NO_TOKEN as in `argmax`.
    """
    assert logits.dtype == torch.float32, logits.dtype
    assert logits.shape[0] == len(positions) == len(rules), (logits.shape, len(positions), len(rules))
    ids = argmax(logits)
    warm = [r for r, rule in enumerate(rules) if rule.temperature > 0.0]
    if warm:
        ids[warm] = _draw(logits[warm], [positions[r] for r in warm], [rules[r] for r in warm])
    return ids


def _draw(logits: torch.Tensor, positions: Sequence[int], rules: Sequence[Rule]) -> torch.Tensor:
    return argmax(_noisy(_filter(_heated(logits, rules), rules), positions, rules, 0))


def draw_scores(logits: torch.Tensor, positions: Sequence[int], rules: Sequence[Rule], first: int) -> torch.Tensor:
    """Float32 [R, n] whose `argmax` over all shards is the draw, for rules with a temperature and no filters.

    logits: of the ids first .. first + n - 1. A filter would have to see the whole vocabulary.
    """
    return _noisy(_heated(logits, rules), positions, rules, first)


def _heated(logits: torch.Tensor, rules: Sequence[Rule]) -> torch.Tensor:
    return (
        logits / torch.tensor([rule.temperature for rule in rules], dtype=torch.float32, device=logits.device)[:, None]
    )


def _noisy(logits: torch.Tensor, positions: Sequence[int], rules: Sequence[Rule], first: int) -> torch.Tensor:
    # Siblings, and all nodes of one depth, share their noise: make it once.
    keys = [(rule.seed, position) for rule, position in zip(rules, positions, strict=True)]
    index = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    noise = _gumbel(list(index), range(first, first + logits.shape[1]), logits.device)
    return logits + noise[[index[key] for key in keys]]


def _filter(logits: torch.Tensor, rules: Sequence[Rule]) -> torch.Tensor:
    """float32 [R, V], already divided by the temperature, with what the filters drop at -inf."""
    if not any(rule.filters for rule in rules):
        return logits
    size = logits.shape[1]

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    ranked, ids = logits.sort(dim=1, descending=True, stable=True)  # stable: equals by id
    kept = torch.arange(size, device=logits.device) < column([rule.top_k or size for rule in rules])
    weight = (ranked.double() - ranked[:, :1].double()).exp() * kept
    total = weight.cumsum(dim=1)[:, -1:]  # not sum: its order may depend on the number of rows
    mass = (weight / total).cumsum(dim=1)
    before = torch.nn.functional.pad(mass[:, :-1], (1, 0))
    # p = 1 is off: rounding must not make the mass before a tiny tail look complete.
    kept &= before < column([rule.top_p if rule.top_p < 1.0 else math.inf for rule in rules])
    kept &= weight >= column([rule.min_p for rule in rules])  # the best weight is 1
    return torch.full_like(logits, -math.inf).scatter(1, ids, ranked.masked_fill(~kept, -math.inf))


def gumbel(seed: int, position: int, n: int) -> torch.Tensor:
    """Gumbel noise of token ids 0..n-1 at one position, float32 [n].

    Philox4x32-10 with key = seed mod 2^64 (low word, high word), counter = (id // 4, position low, position high, 0),
    lane = id % 4; u = (x + 0.5) 2^-32; -log(-log(u)) in float64, then rounded.
    """
    return _gumbel([(seed, position)], range(n), torch.device("cpu"))[0]


def _gumbel(keys: Sequence[tuple[int, int]], ids: range, device: torch.device) -> torch.Tensor:
    """`gumbel` for several (seed, position), of these ids alone: float32 [len(keys), len(ids)]."""
    words = [[seed & _WORD, seed >> 32 & _WORD, position & _WORD, position >> 32] for seed, position in keys]
    key_low, key_high, low, high = torch.tensor(words, device=device).T[:, :, None]
    block = torch.arange(ids.start // 4, (ids.stop + 3) // 4, device=device)[None]
    lanes = philox((block, low, high, torch.zeros_like(low)), (key_low, key_high))
    before = ids.start % 4
    x = torch.stack(lanes, dim=2).flatten(1)[:, before : before + len(ids)]
    u = (x.double() + 0.5) * 2.0**-32
    return -(-u.log()).log().float()


_Words4 = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: _Words4, key: tuple[torch.Tensor, torch.Tensor]) -> _Words4:
    """Philox4x32-10 on int64 tensors that hold 32-bit words and broadcast against each other.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3 (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _mul(0xD2511F53, c0)
        high1, low1 = _mul(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


def _mul(m: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low word of a 32 x 32 bit product, for m >= 2^31."""
    # m - 2^32 is above -2^31, so its product with x fits into int64; the missing x * 2^32 goes to the high word.
    product = x * (m - (1 << 32))
    return (product >> 32) + x, product & _WORD
