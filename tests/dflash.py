"""Random DFlash drafters for random models, engines that have them, and what they draft."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kdtp.config import DrafterConfig, EngineConfig, ModelConfig
from kdtp.draft.base import Ask
from kdtp.draft.dflash.drafter import DFlashDrafter
from kdtp.engine.coordinator import Coordinator
from kdtp.engine.plan import plan
from kdtp.engine.request import Request
from kdtp.engine.widths import Widths
from kdtp.model.weights import safetensors
from kdtp.proposals import Grown, Proposal
from kdtp.spec.tree import grow
from kdtp.types import SamplingParams
from reference.dflash import DFlashConfig
from tests.dflash_cases import V1, V2, draw, shapes, write_folder
from tests.harness import NONE, Done, Harness

BASES = {"v1": V1, "v2": V2}


def drafter_folder(folder: Path, base: dict[str, Any], model: ModelConfig) -> Path:
    """A random drafter for a model."""
    layers = list(range(model.num_hidden_layers))[-2:]
    sizes = {"hidden_size": model.hidden_size, "vocab_size": model.vocab_size, "block_size": 5}
    nested = base["dflash_config"] | {"target_layer_ids": layers}
    values = base | sizes | {"num_target_layers": model.num_hidden_layers, "dflash_config": nested}
    second = {k: v for k, v in nested.items() if k.startswith(("conv", "selector"))}
    config = DFlashConfig(model.hidden_size, 40, 8, 4, 10, 5, 7, (0, 0), (False, False), **second)
    rng = np.random.default_rng(0)
    table = shapes(config, False, len(layers), model.vocab_size)
    return write_folder(folder, values, {name: draw(rng, name, shape) for name, shape in table.items()})


def spoilt(folder: Path, name: str) -> str:
    """Make the last row of a drafter's float32 matrix hold a NaN; how it is refused."""
    path = folder / "model.safetensors"
    file = safetensors.File(path)
    tensors = {key: (stored.dtype, file.read(key)) for key, stored in file.tensors.items()}
    file.close()
    tensors[name][1][-1, 3] = np.nan
    safetensors.write(path, tensors)
    return f"{path}: tensor '{name}': values: want finite numbers, found nan (1 such, in float32)"


def settings(folder: Path, **changes: Any) -> DrafterConfig:
    """Of a drafter in a folder."""
    return DrafterConfig(
        **{"name": "dflash", "block": 5, "budget": 24, "model": str(folder), "placement": "workers"} | changes
    )


class Loaded:
    """Harnesses over one model, with and without a network; each is made when it is first needed."""

    def __init__(self, folder: Path, model: Path, **changes: Any) -> None:
        self.model, self.changes = model, changes
        config = plan(EngineConfig(str(model))).model
        self.folders = {name: drafter_folder(folder / name, base, config) for name, base in BASES.items()}
        self._made: dict[DrafterConfig, Harness] = {}

    def harness(self, drafter: DrafterConfig = NONE) -> Harness:
        """Ranks that have this drafter's network."""
        network = dataclasses.replace(
            drafter, name="dflash" if drafter.network else "none", shape="tree", width="budget", budget=24, trees="auto"
        )
        if network not in self._made:
            self._made[network] = Harness(self.model, drafter=network, **self.changes)
        return self._made[network]

    def settings(self, version: str, **changes: Any) -> DrafterConfig:
        """Of the random drafter of that version."""
        return settings(self.folders[version], **changes)

    def close(self) -> None:
        for harness in self._made.values():
            harness.close()


def random_text(seed: int, size: int) -> tuple[int, ...]:
    """Token ids below 50."""
    rng = random.Random(seed)
    return tuple(rng.randrange(50) for _ in range(size))


def drafts(
    harness: Harness,
    drafter: DrafterConfig,
    requests: Sequence[Sequence[Request]],
    widths: Widths | None = None,
    **changes: Any,
) -> tuple[dict[tuple[int, ...], Proposal], Coordinator]:
    """All proposals of a run, by the text they were made for; requests: those that run together."""
    coordinator = harness.coordinator(drafter, None, **changes)
    coordinator.widths = widths
    found = {}
    assert isinstance(coordinator.drafter, DFlashDrafter)
    coordinator.drafter.shape = ""  # candidates, not trees of them
    propose = coordinator.drafter.propose

    def recording(asks):
        proposals = propose(asks)
        for ask, proposal in zip(asks, proposals, strict=True):
            request = coordinator.scheduler.find(ask.seq)
            found[request.prompt + tuple(request.tokens)] = proposal
        return proposals

    coordinator.drafter.propose = recording  # type: ignore[method-assign]
    for batch in requests:
        for request in batch:
            coordinator.submit(request)
        while not coordinator.idle:
            coordinator.step()
    return found, coordinator


def grown_alike(
    harness: Harness, drafter: DrafterConfig, requests: Sequence[Request], **changes: Any
) -> list[tuple[Request, Grown]]:
    """All trees of a run that were grown where they were drafted, each with its request; they are what the host grows
    of the candidates, bit for bit."""
    coordinator = harness.coordinator(dataclasses.replace(drafter, trees="device"), None, **changes)
    own = coordinator.drafter
    assert isinstance(own, DFlashDrafter)
    propose, found = own.propose, []

    def compared(asks: Sequence[Ask]) -> list[Proposal | None]:
        grown = propose(asks)
        own.shape = ""
        candidates, own.shape = propose(asks), drafter.shape
        for ask, made, proposal in zip(asks, grown, candidates, strict=True):
            request = coordinator.scheduler.find(ask.seq)
            assert request is not None and isinstance(made, Grown) and not isinstance(proposal, Grown | None)
            want = grow(drafter.shape, proposal, request.tokens[-1], ask.budget, ask.depth)
            assert made == want, (ask, made, want)
            found.append((request, made))
        return grown

    own.propose = compared  # type: ignore[method-assign]
    for request in requests:
        coordinator.submit(request)
    while not coordinator.idle:
        coordinator.step()
    return found


def accepted_alike(
    loaded: Loaded,
    plain: Sequence[Done],
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    drafters: Iterable[DrafterConfig],
    **engine: Any,
) -> int:
    """Each drafter gives plain decoding's tokens and bits, and drafts if it has a budget -> draft tokens accepted."""
    accepted = 0
    for drafter in drafters:
        done = loaded.harness(drafter).run(prompts, params, drafter, **engine)
        for got, want in zip(done, plain, strict=True):
            assert got.tokens == want.tokens and got.logits.tobytes() == want.logits.tobytes(), drafter
            accepted += sum(got.usage.accepted_by_depth)
            assert bool(got.usage.drafted_by_depth) == (drafter.budget > 0)
    return accepted
