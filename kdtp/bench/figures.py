"""From the records of a load to figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, zip_longest
from typing import Any

from kdtp.bench.load import Record

QUANTILES = (50, 90, 99)


def quantile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest; 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def gaps(record: Record) -> list[float]:
    """Seconds between two pieces of text, as a reader meets them."""
    return [b - a for a, b in pairwise(record.times)]


def per_token(record: Record) -> float | None:
    """Seconds for each token but the first; None for fewer than two."""
    if record.tokens < 2 or len(record.times) < 2:
        return None
    return (record.times[-1] - record.times[0]) / (record.tokens - 1)


def summary(records: Sequence[Record]) -> dict[str, Any]:
    """Figures of a load; times in milliseconds by quantile. Latencies count from when a request was due."""
    done = [r for r in records if not r.error]
    # From the first that was sent to the last that ended.
    seconds = max((r.ended for r in records), default=0.0) - min((r.sent for r in records), default=0.0)
    tokens = sum(r.tokens for r in done)
    return {
        "requests": len(records),
        "failed": dict(Counter(r.error for r in records if r.error)),
        "seconds": round(seconds, 3),
        "requests_per_second": _rate(len(done), seconds),
        "prompt_tokens": sum(int(r.usage.get("prompt_tokens", 0)) for r in done),
        "cached_tokens": sum(int((r.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)) for r in done),
        "tokens": tokens,
        "tokens_per_second": _rate(tokens, seconds),
        "first_text_ms": _quantiles([r.times[0] - r.due for r in done if r.times]),
        "per_token_ms": _quantiles([each for r in done if (each := per_token(r)) is not None]),
        "gap_ms": _quantiles([gap for r in done for gap in gaps(r)]),
        "whole_ms": _quantiles([r.ended - r.due for r in done]),
        **speculation([r.usage.get("kdtp") or {} for r in done]),
    }


def speculation(costs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What drafts brought, from the usages of an endpoint that tells; zeros from another."""
    rounds = sum(cost.get("rounds", 0) for cost in costs)
    drafted = _added([cost.get("drafted_by_depth", []) for cost in costs])
    accepted = _added([cost.get("accepted_by_depth", []) for cost in costs])
    return {
        "rounds": rounds,
        "tokens_per_round": _rate(sum(cost.get("committed", 0) for cost in costs), rounds),
        "acceptance_by_depth": [_rate(a, d) for a, d in zip(accepted, drafted, strict=True)],
    }


def _added(rows: Sequence[Sequence[int]]) -> list[int]:
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def _quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": round(1e3 * quantile(seconds, q), 3) for q in QUANTILES}


def _rate(count: float, of: float) -> float:
    return round(count / of, 4) if of else 0.0
