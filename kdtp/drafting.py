"""What the coordinator and the ranks say to each other of a network that drafts; joins the unions of kdtp.messages."""

from __future__ import annotations

from msgspec import Struct

from kdtp.types import Count, Token


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
    told them yet."""

    seq: Count
    token: Token
    start: Count
    pages: tuple[Count, ...] = ()


class Draft(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Draft for all of these in one forward of the network. Answered by rank 0 alone, with Drafts of that step."""

    epoch: Count
    step: Count
    roots: tuple[Root, ...]


class Drafts(Struct, frozen=True, forbid_unknown_fields=True, tag=True):
    """Candidates in the frame after this message: float32 lp, then int32 ids [B, L, K].

    shape: of lp, [B, L, K] as in Marginals or [B, L, K, K] as in Conditionals.
    """

    epoch: Count
    step: Count
    rank: Count
    shape: tuple[Count, ...]
