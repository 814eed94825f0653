"""Drafters: sources of proposals for the next tokens of a text. `make` builds the one that a configuration names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kdtp.config import DrafterConfig
from kdtp.draft.base import Ask, Drafter, Kept, Target
from kdtp.draft.ngram import Ngram
from kdtp.draft.none import Nothing

__all__ = ["Ask", "Drafter", "Kept", "Target", "make"]


def make(
    config: DrafterConfig,
    golden: Mapping[tuple[int, ...], tuple[int, ...]],
    vocab_size: int,
    target: Callable[[], Target] | None = None,
) -> Drafter:
    """The drafter `config.name`. golden: what the oracle knows, prompt -> continuation; target: where it is in this
    process, once it is loaded. Raises ValueError for a drafter that needs the target, without one."""
    if config.name == "oracle":
        from kdtp.draft.oracle import Oracle  # torch: only where it is needed

        return Oracle(config, golden, vocab_size)
    if config.name == "dflash":
        from kdtp.draft.dflash.drafter import DFlashDrafter

        if target is None:
            raise ValueError("drafter = 'dflash': the target is not in the coordinator's process")
        return DFlashDrafter(config, target)
    if config.name == "ngram":
        return Ngram(config)
    assert config.name == "none", config.name
    return Nothing()
