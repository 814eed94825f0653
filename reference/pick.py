"""The choice of one token from logits: argmax, or a draw whose randomness is keyed by (seed, absolute position).

The keyed noise makes the text a function of prompt and seed: siblings of a tree share their noise, and only one node of
a depth is walked, so a sampled tree gives the tokens of sampled plain decoding, each drawn from the target's law.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from reference.rules import GREEDY, Rule, edited

PHILOX_MULTIPLIERS = np.array([0xD2511F53, 0xCD9E8D57], np.uint64)
PHILOX_WEYL = np.array([0x9E3779B9, 0xBB67AE85], np.uint64)
LOW = np.uint64(0xFFFFFFFF)
WORD = np.uint64(32)


__all__ = ["GREEDY", "Rule", "choose"]


def choose(
    logits: np.ndarray, position: int, rule: Rule, prompt: Sequence[int] = (), emitted: Sequence[int] = ()
) -> int:
    """The token at `position` (one after the row's own), given the row's float32 logits [V] and the text."""
    logits = edited(logits, rule, prompt, emitted)
    return argmax(logits) if rule.temperature == 0 else sample(logits, position, rule)


def argmax(logits: np.ndarray) -> int:
    """The lowest id among the largest logits."""
    if np.isnan(logits).any():
        raise ValueError("logits hold NaN")
    return int(np.argmax(logits))


def sample(logits: np.ndarray, position: int, rule: Rule) -> int:
    """argmax of logits / T + Gumbel noise over the ids that the filters keep: a draw from their softmax."""
    scaled = logits.astype(np.float32) / np.float32(rule.temperature)
    noise = gumbel(rule.seed, position, len(logits))
    return argmax(np.where(kept(scaled, rule), scaled + noise, np.float32(-np.inf)))


def kept(scaled: np.ndarray, rule: Rule) -> np.ndarray:
    """bool [V]: the ids left by top_k, then top_p, then min_p, each applied to what the one before it left."""
    keep = np.ones(len(scaled), bool)
    if rule.top_k:
        keep &= first(ranked(scaled), rule.top_k)
    if rule.top_p < 1:
        probs = probabilities(scaled, keep)
        order = ranked(probs)
        enough = int(np.searchsorted(np.cumsum(probs[order]), rule.top_p)) + 1
        keep &= first(order, enough)
    if rule.min_p > 0:
        probs = probabilities(scaled, keep)
        keep &= probs >= rule.min_p * probs.max()
    return keep


def ranked(values: np.ndarray) -> np.ndarray:
    """Ids by (value descending, id ascending)."""
    return np.argsort(-values, kind="stable")


def first(order: np.ndarray, count: int) -> np.ndarray:
    """bool [V]: the first `count` ids of `order`."""
    keep = np.zeros(len(order), bool)
    keep[order[:count]] = True
    return keep


def probabilities(scaled: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """Softmax over the kept ids, float64 [V]; 0 for the others."""
    e = np.where(keep, np.exp(scaled.astype(np.float64) - scaled[keep].max()), 0.0)
    return e / e.sum()


def gumbel(seed: int, position: int, n: int) -> np.ndarray:
    """Gumbel noise of token ids 0..n-1 at a position, float32 [n]."""
    blocks = np.arange((n + 3) // 4)
    counter = [blocks, position & 0xFFFFFFFF, position >> 32, 0]
    words = np.stack(philox(seed % 2**64, counter), axis=-1).reshape(-1)[:n]
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log(uniform))).astype(np.float32)


def philox(key: int, counter: Sequence[np.ndarray | int]) -> list[np.ndarray]:
    """Philox4x32-10 (Salmon et al., SC 2011): four 32-bit words per counter, as uint64 arrays of one shape."""
    c0, c1, c2, c3 = np.broadcast_arrays(*(np.asarray(word, np.uint64) for word in counter))
    k = np.array([key & 0xFFFFFFFF, key >> 32], np.uint64)
    for _ in range(10):
        p0, p1 = PHILOX_MULTIPLIERS[0] * c0, PHILOX_MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (p1 >> WORD) ^ c1 ^ k[0], p1 & LOW, (p0 >> WORD) ^ c3 ^ k[1], p0 & LOW
        k = (k + PHILOX_WEYL) & LOW
    return [c0, c1, c2, c3]
