"""Where a rank computes, and what its GPU does before the first step."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from kdtp.config import EngineConfig
from kdtp.engine.choose import argmax
from kdtp.log import logger
from kdtp.model.shard import Shard

if TYPE_CHECKING:
    from kdtp.draft.dflash.part import Part  # loaded if there is a network


def device(kind: str, rank: int) -> torch.device:
    """Rank r of a machine takes its r-th GPU."""
    if kind == "cpu":
        return torch.device("cpu")
    if rank >= torch.cuda.device_count():
        raise ValueError(f"device = {kind!r}: rank {rank} of {torch.cuda.device_count()} GPUs that torch sees")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def prepare_gpu(shard: Shard, part: Part | None, config: EngineConfig) -> None:
    """Capture graphs, if they are wanted, and say where the memory went."""
    pages = shard.cache.kv.nbytes
    weights = torch.cuda.memory_allocated() - pages
    torch.cuda.empty_cache()  # as a capture does: what loading has left is nobody's
    before, _ = torch.cuda.mem_get_info()
    if config.graphs:
        nodes = 1 if config.drafter.name == "none" else 1 + config.drafter.budget
        shard.capture(config.max_batch, nodes, partial(argmax, comm=shard.comm, vocab_start=shard.vocab_start))
        if part is not None:
            part.capture(config.max_batch)
    free, total = torch.cuda.mem_get_info()
    sizes = [f"{size / 2**30:.2f} GiB" for size in (weights, pages, before - free, free, total)]
    text = "GPU memory: weights %s, %d KV pages %s, %d graphs %s; %s of %s are free"
    logger.info(text, sizes[0], shard.cache.pages, sizes[1], shard.graphs, *sizes[2:])
