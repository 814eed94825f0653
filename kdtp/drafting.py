"""What the coordinator and the ranks say to each other of a network that drafts; joins the unions of kdtp.messages."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from kdtp.types import SHAPES, Count, Token

# Of a tree, as kdtp.spec.tree has them; "" where candidates are wanted.
Shape: TypeAlias = Annotated[str, Meta(pattern=f"^({'|'.join(SHAPES)}|)$")]


class Rows(Struct, frozen=True, forbid_unknown_fields=True):
    """Those of the last forward's M rows that stay, as rows start, start + 1, ... of `seq`."""

    seq: Count
    start: Count
    rows: tuple[Count, ...]


class Keep(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Take what the forward of `step` left at these rows into the network's context. Not answered."""

    epoch: Count
    step: Count
    kept: tuple[Rows, ...]


class Root(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Draft what follows `token`, which has `start` committed rows before it; pages: of these rows, if no forward has
    told them yet; budget, depth: of its tree, if there is to be one: nodes below the root, and how deep."""

    seq: Count
    token: Token
    start: Count
    pages: tuple[Count, ...] = ()
    budget: Count = 0
    depth: Count = 0


class Draft(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag=True):
    """Draft for all of these in one forward of the network, and grow trees of that shape, if one is named. Answered by
    rank 0 alone, with Drafts of that step."""

    epoch: Count
    step: Count
    roots: tuple[Root, ...]
    shape: Shape = ""


class Drafts(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """What was drafted, in the frame after this message, as kdtp.draft.dflash.frames has it.

    shape: of candidates' lp, [B, L, K] as in Marginals or [B, L, K, K] as in Conditionals; of trees [B, M].
    """

    epoch: Count
    step: Count
    rank: Count
    shape: tuple[Count, ...]
