"""Which requests can run at all: checked before anything is taken for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import reduce

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


def no_choice(request: Request, vocab_size: int) -> str:
    """Why the rules of a request leave no id for its next token: the rules that do; empty if they leave one."""
    params, matcher = request.params, request.matcher
    everything = (1 << vocab_size) - 1
    rules = {}  # the ids that each one leaves
    if matcher is not None:
        rules["grammar"] = int.from_bytes(matcher.mask(), "little") & everything
        if matcher.error:
            return f"grammar: cannot be followed: {matcher.error}"
    if params.allowed_tokens:
        rules["allowed_tokens"] = _bits(params.allowed_tokens)
    if params.banned_tokens:
        rules["banned_tokens"] = everything & ~_bits(params.banned_tokens)
    if len(request.tokens) < params.min_tokens:
        rules["min_tokens"] = everything & ~_bits(request.stops)  # no end yet
    if reduce(int.__and__, rules.values(), everything):
        return ""
    first, *others = _at_fault(rules, everything)
    return f"{first}: leaves no token" + f" beside {' and '.join(others)}" * bool(others)


def _at_fault(rules: dict[str, int], everything: int) -> list[str]:
    """Those without which there would be a choice; all, if no single one is to blame."""
    without = {name: [ids for other, ids in rules.items() if other != name] for name in rules}
    return [name for name in rules if reduce(int.__and__, without[name], everything)] or list(rules)


def _bits(ids: Collection[int]) -> int:
    bits = bytearray(max(ids, default=0) // 8 + 1)
    for token in ids:
        bits[token >> 3] |= 1 << (token & 7)
    return int.from_bytes(bits, "little")


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
