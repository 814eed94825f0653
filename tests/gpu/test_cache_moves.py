"""Rows that trees keep, moved for all sequences of a round at once: as on a CPU, bit for bit."""

from __future__ import annotations

import random

import pytest
import torch

from kdtp.model.cache import PagedCache
from kdtp.types import PAGE_ROWS, Move
from tests.fake_target import model

PAGES = 3  # of each sequence


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seqs", [1, 2, 64])
def test_rounds_of_moves_are_the_cpus(cuda: torch.device, seqs: int, dtype: torch.dtype) -> None:
    """Over the borders of pages that lie anywhere, of some rows, of all or of none but the root; nobody waits between
    the rounds, whose numbers are on their way to the GPU."""
    rng = random.Random(seqs)
    here, there = (PagedCache(model(), PAGES * seqs, dtype, device=device) for device in (torch.device("cpu"), cuda))
    pages = rng.sample(range(here.pages), here.pages)
    for cache in (here, there):
        for seq in range(seqs):
            cache.append(seq, pages[PAGES * seq : PAGES * (seq + 1)])
    here.kv.normal_(generator=torch.Generator().manual_seed(seqs))
    before = here.kv.clone()
    there.kv.copy_(here.kv)
    rounds = [_moves(rng, seqs) for _ in range(20)]
    for moves in rounds:
        there.move(moves)
    for moves in rounds:
        here.move(moves)
    assert torch.equal(there.kv.cpu(), here.kv) and not torch.equal(here.kv, before)


def _moves(rng: random.Random, seqs: int) -> list[Move]:
    """Of some of the sequences: a root, and of a tree's other nodes some, rising."""
    moves = []
    for seq in rng.sample(range(seqs), rng.randint(1, seqs)):
        nodes = rng.choice((1, 2, 17, 100))
        kept = rng.sample(range(1, nodes), rng.randint(0, nodes - 1))
        moves.append(Move(seq, rng.randint(0, PAGES * PAGE_ROWS - nodes), (0, *sorted(kept))))
    return moves
