"""Continuations of text by a target in training form, for many sequences at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kdtp.train.loop import precision
from kdtp.train.target import Cache, Target

_TOGETHER = 2048  # sequences
Tell = Callable[[int], object]


@torch.no_grad()
def continuations(
    target: Target, prompts: Tensor, length: int, temperatures: Tensor, seed: int, tell: Tell = lambda tokens: None
) -> Tensor:
    """prompts int64 [B, n] on the target's device, followed by the target's own tokens: int64 [B, length].

    temperatures float32 [B]: 0 takes the most likely token. tell: called with how many more tokens are there.
    """
    device = prompts.device
    generator = torch.Generator(device).manual_seed(seed)
    parts = zip(*(torch.split(part, _TOGETHER) for part in (prompts, temperatures.to(device))), strict=True)
    return torch.cat([_continued(target, part, length, heat, generator, tell) for part, heat in parts])


def _continued(
    target: Target, prompts: Tensor, length: int, heat: Tensor, generator: torch.Generator, tell: Tell
) -> Tensor:
    batch, given = prompts.shape
    text = prompts.new_empty(batch, length)
    text[:, :given] = prompts
    kind = prompts.device.type
    with precision(prompts.device):
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
        cache = Cache(target.config, batch, length, dtype, prompts.device)
        hidden, _ = target.hidden(prompts, cache=cache)
        for at in range(given, length):
            logits = target.logits(hidden[:, -1])
            chance = torch.empty_like(logits).exponential_(generator=generator).clamp_min_(1e-30)
            noise = -chance.log()  # Gumbel's, and finite: it is multiplied by 0
            text[:, at] = (logits + heat[:, None] * noise).argmax(-1)
            hidden, _ = target.hidden(text[:, at : at + 1], cache=cache, start=at)
            tell(batch)
    return text
