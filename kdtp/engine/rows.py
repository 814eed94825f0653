"""What a request runs in a step: the next chunk of its text, or the tree grown from its newest token."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kdtp.engine.request import Request
from kdtp.engine.scheduler import Turn
from kdtp.spec.grammar import constrain
from kdtp.types import ROOT, SeqRows, TokenIds, Tree


def verify(request: Request, grown: Tree) -> SeqRows:
    """A tree, or what its grammar leaves of it."""
    if request.matcher is None:
        return _seq_rows(request, grown.tokens, grown.parents, len(grown))
    grown, masks = constrain(grown, request.matcher, request.stops)
    return _seq_rows(request, grown.tokens, grown.parents, len(grown), masks=masks)


def chunk(turn: Turn, most_scored: int) -> SeqRows:
    """As many rows of text as the turn gives; most_scored: rows whose log-probabilities may be wanted at once."""
    request, length = turn.request, len(turn.request.prompt)
    scores = request.params.prompt_logprobs is not None and request.scored < length
    size = min(turn.rows, most_scored) if scores else turn.rows
    end = request.start + size
    # The last row chooses the first token, unless that was emitted before the request was preempted.
    pick, scored = int(end == length and not request.tokens), request.prompt[:0]
    if scores:
        first = max(request.start, request.scored)
        pick, scored = max(0, end - first), request.prompt[first + 1 : end + 1]
    masks = []
    if request.matcher is not None and pick:
        masks = [request.matcher.mask()] * pick  # only the last row chooses
    tokens = request.span(request.start, end)
    return _seq_rows(request, tokens, tuple(range(ROOT, size - 1)), pick, scored, masks)


def _seq_rows(
    request: Request,
    tokens: TokenIds,
    parents: tuple[int, ...],
    pick: int,
    scored: TokenIds = (),
    masks: Sequence[bytes] = (),
) -> SeqRows:
    rows = SeqRows(request.id, request.start, tokens, parents, pick, request.tell_pages(), request.tell(), scored)
    if not masks:
        return rows
    each = {mask: i for i, mask in enumerate(dict.fromkeys(masks))}  # many nodes have the same
    return msgspec.structs.replace(rows, masks=tuple(each), mask_of=tuple(each[mask] for mask in masks))
