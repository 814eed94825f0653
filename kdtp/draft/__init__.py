"""Drafters: sources of proposals for the next tokens of a text. `make` builds the one that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping

from kdtp.config import DrafterConfig
from kdtp.draft.base import Ask, Drafter
from kdtp.draft.ngram import Ngram
from kdtp.draft.none import Nothing
from kdtp.draft.oracle import Oracle

__all__ = ["Ask", "Drafter", "make"]


def make(config: DrafterConfig, golden: Mapping[tuple[int, ...], tuple[int, ...]], vocab_size: int) -> Drafter:
    """The drafter `config.name`. golden: what the oracle knows, prompt -> continuation."""
    if config.name == "oracle":
        return Oracle(config, golden, vocab_size)
    if config.name == "ngram":
        return Ngram(config)
    assert config.name == "none", config.name
    return Nothing()
