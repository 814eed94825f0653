"""What a rule does to logits, given the text they follow: bans, bias and penalties, one after the other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Rule:
    """How tokens are chosen. temperature 0 is argmax; top_k 0, top_p 1 and min_p 0 are off.

    allowed: if not empty, no other id; banned: never; held: not among the first min_tokens emitted; logit_bias: (id,
    what is added); repetition_penalty: of ids in the text; frequency and presence penalty: of ids emitted.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    allowed: tuple[int, ...] = ()
    banned: tuple[int, ...] = ()
    held: tuple[int, ...] = ()
    min_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0


GREEDY = Rule()


def edited(logits: np.ndarray, rule: Rule, prompt: Sequence[int], emitted: Sequence[int]) -> np.ndarray:
    """The float32 logits [V] that temperature and filters get to see, of the token after `prompt` and `emitted`."""
    out = logits.astype(np.float32).copy()
    if rule.allowed:
        others = np.ones(len(out), bool)
        others[list(rule.allowed)] = False
        out[others] = -np.inf
    for token in (*rule.banned, *(rule.held if len(emitted) < rule.min_tokens else ())):
        out[token] = -np.inf
    for token, value in rule.logit_bias:
        out[token] += np.float32(value)
    if rule.repetition_penalty != 1:
        penalty = np.float32(rule.repetition_penalty)
        for token in {*prompt, *emitted}:
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
    for token, count in Counter(emitted).items():
        out[token] -= np.float32(rule.frequency_penalty) * np.float32(count)
        out[token] -= np.float32(rule.presence_penalty)
    return out


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities float64 [V] of the model's own distribution, which no rule has edited."""
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())
