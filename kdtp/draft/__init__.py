"""Drafters: sources of proposals for the next tokens of a text. `make` builds the one that a configuration names."""

from __future__ import annotations

from collections.abc import Mapping

from kdtp.config import DrafterConfig
from kdtp.draft.base import Ask, Drafter, Kept
from kdtp.draft.both import Both
from kdtp.draft.dflash.drafter import DFlashDrafter, Network
from kdtp.draft.ngram import Ngram
from kdtp.draft.none import Nothing

__all__ = ["Ask", "Drafter", "Kept", "Network", "make"]


def make(
    config: DrafterConfig,
    golden: Mapping[tuple[int, ...], tuple[int, ...]],
    vocab_size: int,
    network: Network | None = None,
    on_gpu: bool = False,
) -> Drafter:
    """The drafter `config.name`. golden: what the oracle knows, prompt -> continuation; network: where it is, for a
    drafter that is one; on_gpu: whether it drafts there."""
    if config.name == "oracle":
        from kdtp.draft.oracle import Oracle  # torch: only where it is needed

        return Oracle(config, golden, vocab_size)
    if config.network:
        assert network is not None, "a network that is nowhere"
        if config.name == "dflash+ngram":
            return Both(DFlashDrafter(network), Ngram(config))
        return DFlashDrafter(network, config.grown(on_gpu))
    if config.name == "ngram":
        return Ngram(config)
    assert config.name == "none", config.name
    return Nothing()
