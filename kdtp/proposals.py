"""What a drafter proposes: candidates for the next tokens of a sequence, and how their scores depend on one another.

Letters as in kdtp.types. What a tree is made of them is kdtp.spec.tree's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kdtp.types import Tree

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Marginals:
    """A drafter's per-depth distributions: the K best of each depth, by (logit descending, id ascending).

    lp  float32 [L, K]: log-probability under the full softmax of that depth, never above 0 (-inf: not a candidate)
    ids int64   [L, K]: token ids
    """

    lp: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class Trie:
    """Candidates whose scores depend on their parent, as n-gram lookup gives them.

    Node i + 1 has tokens[i], the parent parents[i] (0 is the root, which is not listed; parents[i] <= i) and
    lp[i] <= 0, its log-probability given that parent. Siblings have distinct tokens.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    lp: Sequence[float]

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents) == len(self.lp), "a trie's lists differ in length"


@dataclass(frozen=True)
class Conditionals:
    """A drafter's K candidates of each depth, scored given each candidate of the depth before, as DFlash2 gives them.

    lp  float32 [L, K, K]: lp[d, p, c] <= 0, log-probability of candidate c of depth d + 1 after candidate p of depth
    d; at d = 0 row 0 alone counts: the root precedes (-inf: not a candidate)
    ids int64   [L, K]: token ids, distinct in a depth
    """

    lp: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class Merged:
    """Two proposals for one text as one. A token that both have in some place is one node, with the better score, and
    both say what follows it; after a token that one of them does not have, the other alone does."""

    network: Marginals | Conditionals
    lookup: Trie


class Grown(NamedTuple):
    """A tree, and the log-probability of each node's path under the drafter; the root's is 0."""

    tree: Tree
    scores: Sequence[float]

    def cut(self, nodes: int) -> Grown:
        """Its first nodes below the root: a tree of so small a budget, as parents come before their children."""
        if nodes >= len(self.tree) - 1:
            return self
        tree = Tree(self.tree.tokens[: 1 + nodes], self.tree.parents[: 1 + nodes])
        return Grown(tree, self.scores[: 1 + nodes])


Candidates = Marginals | Trie | Conditionals | Merged
Proposal = Candidates | Grown
