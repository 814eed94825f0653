"""What a rule does to logits before a token is chosen, at every node of a tree with that node's own text.

The order, which is that of vLLM and, for what both have, of Hugging Face's processors: what the grammar allows, allowed
and banned ids, ids held back until min_tokens, logit_bias, repetition penalty, frequency and presence penalty; then, in
spec/pick.py, temperature, top_k, top_p, min_p. Every step treats an id by itself, so each rank edits its own part of
the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch

from kdtp.types import ROOT, Rule, SeqRows, depths


class Editor:
    """The edits of one sequence, for the ids first .. first + width - 1, and the counts of its text so far.

    prompt, said: prompt and emitted tokens, the root last; only a rule that counts needs them.
    """

    def __init__(
        self,
        rule: Rule,
        prompt_length: int,
        prompt: Sequence[int],
        said: Sequence[int],
        ids: range,
        device: torch.device,
    ) -> None:
        self._rule = rule
        self._prompt_length = prompt_length
        self._ids = ids
        self._device = device
        self._bias = self._fixed_bias()
        self._held = self._own(rule.held)
        self._in_prompt = torch.zeros(len(ids), dtype=torch.bool, device=device)
        self._count = torch.zeros(len(ids) if rule.counts else 0, device=device)
        self._in_prompt[self._own(prompt)] = True
        self.say(said)

    def say(self, tokens: Sequence[int]) -> None:
        """Count tokens that were emitted, if the rule wants them counted."""
        if tokens and self._rule.counts:
            index = self._own(tokens)
            self._count.index_put_((index,), torch.ones(len(index), device=self._device), accumulate=True)

    def edit(self, logits: torch.Tensor, rows: SeqRows) -> None:
        """Change the logits float32 [pick, width] of a forward's picked rows, in place."""
        if self._bias is not None:
            logits += self._bias
        depth = depths(rows.parents)[len(rows.tokens) - rows.pick :]
        early = [i for i, d in enumerate(depth) if rows.start + d + 1 < self._rule.held_until]
        if early and len(self._held):
            logits[torch.tensor(early, device=self._device)[:, None], self._held] = -math.inf
        if self._rule.counts:
            self._penalise(logits, rows)

    def _penalise(self, logits: torch.Tensor, rows: SeqRows) -> None:
        rule = self._rule
        count = self._count.expand(len(logits), -1)
        # The rows of a prompt are in no tree: what stands between the root and them was not emitted.
        if rows.start >= self._prompt_length and len(rows.tokens) > 1:
            count = count.clone()
            row, token = self._drafted(rows)
            count.index_put_((row, token), torch.ones(len(row), device=self._device), accumulate=True)
        if rule.repetition_penalty != 1.0:
            weaker = torch.where(logits > 0, logits / rule.repetition_penalty, logits * rule.repetition_penalty)
            logits.copy_(torch.where(self._in_prompt | (count > 0), weaker, logits))
        logits -= rule.frequency_penalty * count
        logits -= rule.presence_penalty * (count > 0)

    def _drafted(self, rows: SeqRows) -> tuple[torch.Tensor, torch.Tensor]:
        """(picked row, local id) of each token between the root and a picked row, the row's own included."""
        first = len(rows.tokens) - rows.pick
        pairs = [(node - first, token) for node, token in _paths(rows) if node >= first and token in self._ids]
        row, token = torch.tensor(pairs, dtype=torch.int64, device=self._device).view(-1, 2).T
        return row, token - self._ids.start

    def _fixed_bias(self) -> torch.Tensor | None:
        rule = self._rule
        if not (rule.allowed or rule.banned or rule.logit_bias):
            return None
        bias = torch.zeros(len(self._ids), device=self._device)
        if rule.allowed:
            bias.fill_(-math.inf)
            bias[self._own(rule.allowed)] = 0.0
        bias[self._own(rule.banned)] = -math.inf
        for token, value in rule.logit_bias:
            if token in self._ids:
                bias[token - self._ids.start] += value
        return bias

    def _own(self, tokens: Iterable[int]) -> torch.Tensor:
        """Those of this part of the vocabulary, as local ids."""
        local = [token - self._ids.start for token in tokens if token in self._ids]
        return torch.tensor(local, dtype=torch.int64, device=self._device)


def mask(logits: torch.Tensor, rows: SeqRows, ids: range) -> None:
    """Drop from the logits float32 [pick, width] of the given ids what a forward's masks do not allow, in place."""
    size = (ids.stop + 7) // 8
    packed = bytearray(b"".join(mask[:size].ljust(size, b"\0") for mask in rows.masks))
    # Unpacked where the logits are: there they are eight times as large.
    octets = torch.frombuffer(packed, dtype=torch.uint8).view(len(rows.masks), size, 1).to(logits.device)
    bits = (octets >> torch.arange(8, dtype=torch.uint8, device=logits.device) & 1).flatten(1)
    allowed = bits[:, ids.start : ids.stop].bool()
    logits.masked_fill_(~allowed[torch.tensor(rows.mask_of, device=logits.device)], -math.inf)


def _paths(rows: SeqRows) -> Iterator[tuple[int, int]]:
    """(node, token of the node or of one of its ancestors), without the root."""
    for node in range(len(rows.tokens)):
        at = node
        while rows.parents[at] != ROOT:
            yield node, rows.tokens[at]
            at = rows.parents[at]
