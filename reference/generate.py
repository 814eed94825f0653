"""Generation: prefill, then rounds of draft, build, verify, accept, commit. A root-only tree is plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from reference import mask
from reference.accept import walk
from reference.cache import Cache
from reference.model import Model
from reference.pick import GREEDY, Rule, choose
from reference.tree import Proposal, Tree, build, chain, depths

SHAPES = {"tree": build, "chain": chain}


def nothing(known: Sequence[int], depth: int) -> None:
    """The drafter of plain decoding."""


@dataclass(frozen=True)
class Draft:
    """Where trees come from.

    propose: (tokens known so far, depth) -> candidates for the next `depth` tokens; block: tokens a round can emit, so
    block - 1 are drafted; budget: nodes beside the root; shape: "tree" or "chain".
    """

    propose: Callable[[Sequence[int], int], Proposal | None] = nothing
    block: int = 8
    budget: int = 16
    shape: str = "tree"


@dataclass
class Generation:
    """What was emitted, and what it took.

    logits: of each emitted token, the row [V] that chose it; reason: "stop" or "length"; rounds: verify forwards;
    forwards: those and the prefill; committed: kept rows whose token was emitted, roots included;
    drafted_by_depth, accepted_by_depth: rounds in which a node of depth d + 1 was offered, and was emitted.
    """

    tokens: list[int] = field(default_factory=list)
    logits: list[np.ndarray] = field(default_factory=list)
    reason: str = ""
    rounds: int = 0
    forwards: int = 0
    committed: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)


class Request:
    """One text being continued. `known` is the prompt and what was emitted; its last token is the root."""

    def __init__(
        self, model: Model, prompt: Sequence[int], max_tokens: int, rule: Rule, stop: Collection[int], draft: Draft
    ) -> None:
        self.longest = model.config.max_position_embeddings
        if not 1 <= len(prompt) <= self.longest:
            raise ValueError(f"prompt of {len(prompt)} tokens: must be 1..{self.longest}")
        self.model, self.max_tokens, self.rule, self.stop, self.draft = model, max_tokens, rule, stop, draft
        self.cache = Cache(model.config, self.longest + draft.budget)
        self.prompt = tuple(prompt)
        self.known = list(prompt)
        self.out = Generation(drafted_by_depth=[0] * (draft.block - 1), accepted_by_depth=[0] * (draft.block - 1))

    def verify(self, tree: Tree) -> tuple[list[int], np.ndarray]:
        """Run a tree behind the committed rows: the token chosen after each node, and the logits [M, V]."""
        start = self.cache.length
        positions = mask.positions(start, tree.parents)
        logits = self.model.forward_tokens(tree.tokens, positions, mask.dense(start, tree.parents), self.cache)
        self.out.forwards += 1
        texts = self.emitted_at(tree)
        rows = zip(logits, positions, texts, strict=True)
        return [choose(row, at + 1, self.rule, self.prompt, text) for row, at, text in rows], logits

    def emitted_at(self, tree: Tree) -> list[tuple[int, ...]]:
        """What will have been emitted when the walk stands at a node: for the prompt's own rows nothing."""
        if not self.out.tokens:
            return [()] * len(tree.tokens)
        texts: list[tuple[int, ...]] = []
        for token, parent in zip(tree.tokens, tree.parents, strict=True):
            texts.append(tuple(self.out.tokens) if parent < 0 else (*texts[parent], token))
        return texts

    def prefill(self) -> None:
        """Run the prompt, a chain, and emit the first token."""
        ids, logits = self.verify(Tree(tuple(self.known), tuple(range(-1, len(self.known) - 1))))
        self.cache.commit(range(len(self.known)))
        self.emit(ids[-1:], logits[-1:])

    def round(self) -> None:
        """Draft, build, verify, accept, commit, emit."""
        tree = SHAPES[self.draft.shape](*self.drafted())
        ids, logits = self.verify(tree)
        path = walk(tree, ids)
        rows = list(path.rows)
        self.cache.commit(rows)
        emitted = self.emit([ids[row] for row in rows], logits[rows])
        self.account(tree, len(rows), emitted)

    def drafted(self) -> tuple[Proposal | None, int, int, int]:
        """Candidates, root, budget and depth of the next tree.

        A round emits one token more than it accepts, but the last token of a text may be an accepted node: then the
        bonus is cut. No node may stand beyond the last position.
        """
        room = self.max_tokens - len(self.out.tokens)
        depth = min(self.draft.block - 1, room, self.longest - 1 - self.cache.length)
        return self.draft.propose(self.known, depth), self.known[-1], self.draft.budget, depth

    def emit(self, chosen: Sequence[int], logits: np.ndarray) -> int:
        """Append chosen tokens, cut behind the first stop token and at max_tokens; how many were appended."""
        room = self.max_tokens - len(self.out.tokens)
        stops = [i + 1 for i, token in enumerate(chosen[:room]) if token in self.stop]
        count = min([room, len(chosen), *stops])
        self.known += chosen[:count]
        self.out.tokens += chosen[:count]
        self.out.logits += list(logits[:count])
        if stops:
            self.out.reason = "stop"
        elif count == room or self.cache.length == self.longest:
            self.out.reason = "length"
        return count

    def account(self, tree: Tree, kept: int, emitted: int) -> None:
        """Count one round: its offered depths, and what was accepted and emitted."""
        self.out.rounds += 1
        accepted = min(kept - 1, emitted)
        self.out.committed += 1 + accepted
        for d in range(max(depths(tree.parents))):
            self.out.drafted_by_depth[d] += 1
            self.out.accepted_by_depth[d] += d < accepted


def generate(
    model: Model,
    prompt: Sequence[int],
    max_tokens: int,
    rule: Rule = GREEDY,
    stop: Collection[int] = (),
    draft: Draft | None = None,
) -> Generation:
    """Continue `prompt` by at most `max_tokens` tokens, ended early by a stop token (emitted) or the context's end.

    The last token that can be run has position max_position_embeddings - 1.
    """
    request = Request(model, prompt, max_tokens, rule, stop, draft or Draft(budget=0))
    request.prefill()
    while not request.out.reason:
        request.round()
    return request.out
