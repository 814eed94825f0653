"""Top-K with log-probabilities, and argmax: ids exactly, ties included."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from tests.gpu.cases import Case, Output

TOLERANCE = (1e-5, 1e-6)
Rows = Callable[[np.random.Generator, int, int], np.ndarray]  # (rng, rows, vocab) -> float32 [rows, vocab]


def _random(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    return rng.standard_normal((rows, vocab), np.float32) * 4


def _ties(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Few values, zeros of both signs among them."""
    x = rng.integers(-3, 4, (rows, vocab)).astype(np.float32) / 2
    return np.where(rng.random((rows, vocab)) < 0.5, x, -x)


def _masked(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """All but a few, and in the first row all, are -inf."""
    x = _random(rng, rows, vocab)
    x[rng.random((rows, vocab)) < 0.999] = -np.inf
    x[0] = -np.inf
    return x


def _equal(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    return np.repeat(_random(rng, rows, 1), vocab, axis=1)


def _rising(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    return np.sort(_random(rng, rows, vocab))


def _gathered(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """The largest lie where few threads read them all."""
    x = np.sort(_random(rng, rows, vocab))
    near = np.argsort(np.arange(vocab) // 8 % 2048, kind="stable")
    out = np.empty_like(x)
    out[:, near[::-1]] = x
    return out


def _broken(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """A NaN, a +inf, both, NaN everywhere; one row is sound."""
    x = _random(rng, rows, vocab)
    at = rng.integers(0, vocab, rows)
    x[0, at[0]], x[1, at[1]], x[2, at[2]] = np.nan, np.inf, np.inf
    x[2, (at[2] + 1) % vocab], x[3] = -np.nan, np.nan
    x[5, 0] = np.nan
    return x


KINDS: tuple[Rows, ...] = (_random, _ties, _masked, _equal, _rising, _gathered)


def cases() -> Iterator[Case]:
    """Vocabularies below and above a block's share, shards, the whole; every k that is special; strided rows."""
    rng = np.random.default_rng(7)
    for rows, vocab, k, gap in (
        (1, 1, 1, 0), (2, 3, 3, 5), (3, 100, 64, 0), (5, 512, 8, 0), (2, 4099, 33, 901), (7, 20480, 64, 0),
        (4, 32769, 64, 3), (2, 129280, 10, 0), (7, 163840, 64, 0), (1, 163840, 1, 0), (1, 262144, 64, 4),
        (0, 512, 8, 0),
    ):  # fmt: skip
        yield _topk("random", _random(rng, rows, vocab), k, gap)
    for kind in KINDS[1:]:
        for rows, vocab, k, gap in ((2, 37, 37, 0), (3, 1000, 64, 1), (2, 163840, 64, 0)):
            yield _topk(kind.__name__[1:], kind(rng, rows, vocab), k, gap)
    yield _topk("broken", _broken(rng, 6, 5000), 64, 0)
    yield _topk("broken", _broken(rng, 6, 9), 4, 3)
    yield from _argmaxes(rng)


def _argmaxes(rng: np.random.Generator) -> Iterator[Case]:
    for rows, vocab, start, gap in (
        (1, 1, 0, 0), (3, 31, 7, 2), (5, 512, 0, 0), (64, 20480, 3 * 20480, 0), (2, 40001, 1 << 40, 3),
        (1, 163840, 0, 0), (0, 512, 0, 0),
    ):  # fmt: skip
        yield _argmax("random", _random(rng, rows, vocab), start, gap)
    for kind in KINDS[1:]:
        for rows, vocab, start, gap in ((3, 37, 5, 0), (2, 33000, 100, 1)):
            yield _argmax(kind.__name__[1:], kind(rng, rows, vocab), start, gap)
    yield _argmax("broken", _broken(rng, 6, 40000), 10, 0)


def _strided(logits: np.ndarray, gap: int) -> np.ndarray:
    """The rows with NaN between them, behind the last too."""
    return np.concatenate([logits, np.full((len(logits), gap), np.nan, np.float32)], axis=1)


def _topk(kind: str, logits: np.ndarray, k: int, gap: int) -> Case:
    rows, vocab = logits.shape
    lp, ids = np.empty((rows, k), np.float32), np.empty((rows, k), np.int64)
    for r, row in enumerate(logits):
        lp[r], ids[r] = _best(row, k)
    scalars = {"rows": rows, "vocab": vocab, "stride": vocab + gap, "k": k}
    name = f"topk-{rows}x{vocab}{f'+{gap}' if gap else ''}-k{k}-{kind}"
    outputs = {"lp": Output(lp, *TOLERANCE), "ids": Output(ids)}
    return Case(name, "topk", scalars, {"logits": _strided(logits, gap)}, outputs)


def _best(row: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    if np.isnan(row).any() or row.max() == np.inf:
        return np.full(k, np.nan, np.float32), np.arange(k)
    ids = np.argsort(-row, kind="stable")[:k]
    if row.max() == -np.inf:
        return row[ids], ids
    wide = row.astype(np.float64)
    return (wide[ids] - wide.max() - np.log(np.exp(wide - wide.max()).sum())).astype(np.float32), ids


def _argmax(kind: str, logits: np.ndarray, start: int, gap: int) -> Case:
    rows, vocab = logits.shape
    ids = np.array([int(np.argmax(row)) for row in logits], np.int64)  # numpy's takes the first NaN, if there is one
    values = logits[np.arange(rows), ids].astype(np.float32)
    scalars = {"rows": rows, "vocab": vocab, "stride": vocab + gap, "vocab_start": start}
    name = f"argmax-{rows}x{vocab}{f'+{gap}' if gap else ''}-{kind}"
    outputs = {"values": Output(values), "ids": Output(ids + start, mask=~np.isnan(values))}
    return Case(name, "argmax", scalars, {"logits": _strided(logits, gap)}, outputs)
