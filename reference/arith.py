"""Sums, exp and what follows from them, with one result on every machine.

A BLAS product and numpy's own exp change in their last bits with the CPU. Here a sum is a binary tree of elementwise
additions and exp is a polynomial, so only IEEE +, -, *, / and scaling by powers of two remain, each rounded the same
everywhere. Every row is computed by itself: what else is in the batch cannot change one bit of it.
"""

from __future__ import annotations

import math

import numpy as np

# ln 2 in two parts: the first has 21 trailing zero bits, so k * LN2_HIGH is exact for every k that occurs.
LN2_HIGH = 6.93147180369123816490e-01
LN2_LOW = 1.90821492927058770002e-10


def tree_sum(terms: np.ndarray) -> np.ndarray:
    """Sum over the last axis by halving: term i is added to term i + ceil(n / 2) until one is left.

    Overwrites `terms`.
    """
    n = terms.shape[-1]
    while n > 1:
        half = (n + 1) // 2
        terms[..., : n - half] += terms[..., half:n]
        n = half
    return terms[..., 0]


def vecmat(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """x [..., K] times w [..., K, N] -> [..., N]; leading axes are paired."""
    return tree_sum((x[..., :, None] * w).swapaxes(-1, -2))


def linear(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """y = x @ W: x [M, K], w [K, N] -> [M, N], row by row."""
    return np.stack([vecmat(row, w) for row in x])


def exp(x: np.ndarray) -> np.ndarray:
    """e^x of float32, to half an ulp and a little: 2^k times the Taylor series of the remainder, in float64."""
    x = np.clip(x, -104.0, 88.7).astype(np.float64)  # beyond: 0 and the largest float32
    k = np.rint(x / (LN2_HIGH + LN2_LOW))
    r = (x - k * LN2_HIGH) - k * LN2_LOW
    series = np.zeros_like(r)
    for n in range(14, -1, -1):
        series *= r
        series += 1.0 / math.factorial(n)
    return np.ldexp(series, k.astype(np.int32)).astype(np.float32)


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis, [..., N]."""
    e = exp(x - x.max(axis=-1, keepdims=True))
    return e / tree_sum(e.copy())[..., None]


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + e^-x)."""
    return np.float32(1.0) / (np.float32(1.0) + exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return x * sigmoid(x)
