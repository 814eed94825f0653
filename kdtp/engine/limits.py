"""Which requests can run at all: checked before anything is taken for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kdtp.config import EngineConfig, ModelConfig
from kdtp.engine.pages import pages_for
from kdtp.engine.request import Request


def longest(request: Request, model: ModelConfig) -> int:
    """Rows that a request can come to have, without its tree."""
    return min(len(request.prompt) + request.params.max_tokens, model.max_position_embeddings)


def check_request(request: Request, config: EngineConfig, model: ModelConfig) -> None:
    """Raise ValueError if the request can never run, naming what, the value and what is legal."""
    if not request.prompt:
        raise ValueError("prompt = []: must have at least one token")
    for key, ids in _ids_of(request):
        bad = next((i for i, token in enumerate(ids) if not 0 <= token < model.vocab_size), None)
        if bad is not None:
            raise ValueError(f"{key}[{bad}] = {ids[bad]}: must be in [0, {model.vocab_size})")
    if len(request.prompt) > model.max_position_embeddings:
        limit = model.max_position_embeddings
        raise ValueError(f"prompt: {len(request.prompt)} tokens, but the model's context is {limit}")
    _check_given(request, model)
    if request.budget is not None and request.budget < 0:
        raise ValueError(f"budget = {request.budget}: must be at least 0")
    # At its longest, with a tree of one node: wider ones wait until there is room.
    need, have = pages_for(longest(request, model)), config.pages(model)
    if need > have:
        amounts = f"prompt of {len(request.prompt)} and max_tokens {request.params.max_tokens}"
        raise ValueError(f"{amounts} need {need} KV pages, the cache has {have}")


def _check_given(request: Request, model: ModelConfig) -> None:
    """What was emitted before the request came here must leave it something to emit."""
    count, most = len(request.tokens), request.params.max_tokens
    if not count:
        return
    if count >= most or len(request.prompt) + count > model.max_position_embeddings:
        limits = f"max_tokens {most}, a prompt of {len(request.prompt)}, a context of {model.max_position_embeddings}"
        raise ValueError(f"given: {count} tokens, which is all that can be emitted with {limits}")
    if stops := request.stops.intersection(request.tokens):
        raise ValueError(f"given: holds {min(stops)}, which ends the text")


def _ids_of(request: Request) -> Iterator[tuple[str, Sequence[int]]]:
    params = request.params
    yield "prompt", request.prompt
    yield "given", request.tokens
    yield "stop_tokens", params.stop_tokens
    yield "allowed_tokens", params.allowed_tokens
    yield "banned_tokens", params.banned_tokens
    yield "logit_bias", tuple(params.logit_bias)
