"""The router: ids exactly, weights within float32's roundings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tests.gpu.cases import Case, Output

SOFTMAX, SIGMOID = 0, 1
GAP = 1e-5  # relative, between what is chosen and what is not: far above what implementations of exp differ by


@dataclass(frozen=True)
class Rule:
    """The op's numbers but for the rows."""

    experts: int
    topk: int
    scoring: int
    groups: int = 1
    topk_group: int = 1
    norm: int = 1
    scale: float = 1.0


BIASED = (
    Rule(384, 8, SIGMOID, scale=2.827),  # Kimi K2
    Rule(256, 8, SIGMOID, 8, 4, scale=2.5),  # DeepSeek-V3
    Rule(8, 2, SIGMOID, 4, 2, scale=2.5),
    Rule(33, 5, SIGMOID, 3, 2, norm=0, scale=1.5),
    Rule(33, 1, SIGMOID, scale=2.0),
    Rule(1024, 32, SIGMOID, 64, 16),
    Rule(1, 1, SIGMOID),
)
PLAIN = (
    Rule(160, 6, SOFTMAX, 8, 3, norm=0, scale=16.0),  # DeepSeek-V2
    Rule(64, 6, SOFTMAX, norm=0),  # DeepSeek-V2-Lite
    Rule(8, 2, SOFTMAX, scale=3.0),
    Rule(33, 5, SOFTMAX, 33, 7, scale=3.0),
    Rule(33, 1, SOFTMAX, scale=3.0),
    Rule(384, 8, SIGMOID, scale=3.0),
    Rule(1024, 32, SOFTMAX),
    Rule(1, 1, SOFTMAX),
)


def cases() -> Iterator[Case]:
    """Random scores, scores with many ties, rows of equal scores, and scores that vanish in float32."""
    rng = np.random.default_rng(6)
    for rules, biased in ((BIASED, True), (PLAIN, False)):
        for rule in rules:
            for kind, draw in KINDS.items():
                for rows in (1, 65):
                    yield _case(rng, kind, draw, rows, rule, biased)
        yield _case(rng, "random", KINDS["random"], 0, rules[0], biased)


Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
KINDS: dict[str, Draw] = {
    "random": lambda rng, shape: rng.standard_normal(shape),
    "ties": lambda rng, shape: rng.integers(-4, 5, shape) / 4,
    "equal": lambda rng, shape: np.full(shape, rng.integers(-2, 3) / 2),
    "vanishing": lambda rng, shape: np.where(rng.random(shape) < 0.98, -400.0, rng.integers(-3, 4, shape) / 2),
}


def _case(rng: np.random.Generator, kind: str, draw: Draw, rows: int, rule: Rule, biased: bool) -> Case:
    bias = draw(rng, (rule.experts,)).astype(np.float32) / 4 if biased else None
    logits, ids, weights = [], [], []
    while len(ids) < rows:
        row = draw(rng, (rule.experts,)).astype(np.float32)
        if (found := _route(row, bias, rule)) is not None:
            logits.append(row)
            ids.append(found[0])
            weights.append(found[1])
    scalars = {"rows": rows, **vars(rule)}
    inputs = {"logits": np.array(logits, np.float32).reshape(rows, rule.experts)}
    if bias is not None:
        inputs["bias"] = bias
    if kind == "random":  # rows without a place in the cache are padding
        inputs["kv_rows"] = rng.integers(-1, 3, rows)
        ids = [row if place >= 0 else [-1] * rule.topk for row, place in zip(ids, inputs["kv_rows"], strict=True)]
    outputs = {
        "ids": Output(np.array(ids, np.int32).reshape(rows, rule.topk)),
        "weights": Output(np.array(weights, np.float32).reshape(rows, rule.topk), 1e-30, 4e-6),
    }
    grouped = f"-{rule.topk_group}of{rule.groups}" if rule.groups > 1 else ""
    scoring = ("softmax", "sigmoid")[rule.scoring] + ("+bias" if biased else "")
    name = f"router-{rows}x{rule.experts}-top{rule.topk}{grouped}-{scoring}-norm{rule.norm}-{kind}"
    return Case(name, "router", scalars, inputs, outputs)


def _route(logits: np.ndarray, bias: np.ndarray | None, rule: Rule) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids and weights of one row; None if they hang on the last bits of an exponential."""
    scores = _scores(logits.astype(np.float64), rule.scoring).astype(np.float32)
    choice = scores if bias is None else scores + bias
    clear = True
    if rule.groups > 1:
        groups = choice.reshape(rule.groups, -1)
        ordered = -np.sort(-groups, axis=-1)
        values = ordered[:, 0] if bias is None else ordered[:, 0] + ordered[:, 1]
        kept, clear = _first_best(values, rule.topk_group)
        choice = np.full_like(groups, -np.inf)
        choice[kept] = groups[kept]
        choice = choice.ravel()
    ids, chosen_clear = _first_best(choice, rule.topk)
    weights = scores[ids].astype(np.float64)
    normed = rule.norm and (bias is not None or rule.topk > 1)
    if normed:
        weights = weights / (weights.sum() + 1e-20)
    if not normed or bias is not None:
        weights = weights * rule.scale
    return (ids, weights) if clear and chosen_clear else None


def _scores(logits: np.ndarray, scoring: int) -> np.ndarray:
    if scoring == SIGMOID:
        return 1 / (1 + np.exp(-logits))
    e = np.exp(logits - logits.max())
    return e / e.sum()


def _first_best(values: np.ndarray, k: int) -> tuple[np.ndarray, bool]:
    """The indices of the k largest, ascending, and whether the next one is equal or well below."""
    order = np.argsort(-values, kind="stable")
    if k == len(values) or values[order[k]] == -np.inf:
        return np.sort(order[:k]), True
    gap = values[order[k - 1]] - values[order[k]]
    return np.sort(order[:k]), bool(gap == 0 or gap > GAP * abs(values[order[k - 1]]))
