"""The proof behind `kdtp generate --check`: speculative == plain == golden, and how far the logits are apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdtp.engine.api import Completion
from kdtp.engine.plan import Golden


@dataclass(frozen=True)
class Verdict:
    """The outcome. golden_tokens: how many were compared with the golden text; without one it is 0, and matches_golden
    and max_abs_logit_diff (to the golden logits) are None."""

    tokens: int
    equal: int
    golden_tokens: int
    matches_ar: bool
    matches_golden: bool | None
    max_abs_logit_diff: float | None
    max_abs_logit_diff_ar: float

    @property
    def holds(self) -> bool:
        """Whether everything that could be compared is equal."""
        return self.matches_ar and self.matches_golden is not False

    def figures(self) -> dict[str, Any]:
        """As in the JSON output."""
        return {
            "matches_ar": self.matches_ar,
            "matches_golden": self.matches_golden,
            "golden_tokens": self.golden_tokens,
            "max_abs_logit_diff": self.max_abs_logit_diff,
            "max_abs_logit_diff_ar": self.max_abs_logit_diff_ar,
        }

    def line(self, method: str) -> str:
        """One line for the screen."""
        names = [method, "AR"] if method != "AR" else ["AR", "AR again"]
        if self.matches_golden is not None:
            names.append("golden" if self.golden_tokens == self.tokens else f"golden[:{self.golden_tokens}]")
        sign = " == " if self.holds else " != "
        difference = self.max_abs_logit_diff if self.max_abs_logit_diff is not None else self.max_abs_logit_diff_ar
        return f"{sign.join(names)}: {self.equal}/{self.tokens}, max_abs_logit_diff={difference:.3e}"


def check(done: Completion, plain: Completion, golden: Golden | None) -> Verdict:
    """Compare a completion with plain decoding by the same engine, and with the numpy reference's tokens and logits.

    golden: what the completion must begin with, all of it.
    """
    truth = golden.tokens if golden else ()
    count = max(len(done.tokens), len(plain.tokens), len(truth))
    pairs = [(_at(done.tokens, i), _at(plain.tokens, i), _at(truth, i)) for i in range(count)]
    return Verdict(
        tokens=count,
        equal=sum(a == b and c in (a, None) for a, b, c in pairs),
        golden_tokens=len(truth),
        matches_ar=done.tokens == plain.tokens and done.finish_reason == plain.finish_reason,
        matches_golden=done.tokens[: len(truth)] == truth if golden else None,
        max_abs_logit_diff=_difference(done.logits, golden.logits) if golden else None,
        max_abs_logit_diff_ar=_difference(done.logits, plain.logits),
    )


def _at(tokens: tuple[int, ...], i: int) -> int | None:
    return tokens[i] if i < len(tokens) else None


def _difference(a: NDArray[np.float32] | None, b: NDArray[np.float32] | None) -> float:
    assert a is not None and b is not None, "logits were not asked for"
    n = min(len(a), len(b))
    return float(np.max(np.abs(a[:n].astype(np.float64) - b[:n]), initial=0.0))
