"""kdtp: tensor-parallel inference for MLA + MoE language models with exact DDTree speculative decoding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kdtp.version import __version__

if TYPE_CHECKING:
    from kdtp.engine.api import Engine
    from kdtp.types import SamplingParams

__all__ = ["Engine", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Loaded on first use: importing torch takes seconds, and `kdtp --help` needs none of it.
    if name == "Engine":
        from kdtp.engine.api import Engine

        return Engine
    if name == "SamplingParams":
        from kdtp.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'kdtp' has no attribute {name!r}")
