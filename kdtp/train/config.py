"""Recipes: what a network looks like and how it is trained. JSON files; those of the shipped pair lie in `recipes`."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from kdtp.config import ConfigError, Range, build, check_ranges
from kdtp.model.weights.hf_config import load_json

RECIPES = Path(__file__).parent / "recipes"
Count = Annotated[int, Range(1, 1 << 24)]
Part = Annotated[float, Range(0.0, 1.0)]


@dataclass(frozen=True)
class TrainConfig:
    """How any of the two is trained: AdamW, a warm-up, then a learning rate that falls to zero.

    batch, seq: sequences per step and their tokens. epochs: at most so many tokens, in sizes of the training text.
    warmup: part of the run in which the learning rate rises.
    """

    batch: Count
    seq: Annotated[int, Range(16, 1 << 20)]
    epochs: Annotated[float, Range(0.001, 1e6)]
    learning_rate: Annotated[float, Range(1e-8, 1.0)]
    weight_decay: Annotated[float, Range(0.0, 10.0)]
    warmup: Part

    def __post_init__(self) -> None:
        check_ranges(self, "train.")


@dataclass(frozen=True)
class TargetTrain(TrainConfig):
    """dropout: of the embedding and of what a layer adds. balance: step of an expert's correction bias."""

    dropout: Part = 0.0
    balance: Part = 0.001


@dataclass(frozen=True)
class DrafterTrain(TrainConfig):
    """prompt: tokens of text before the target's own continuation, which fills a sequence up to `seq`. samples: such
    sequences. temperatures: they take turns with these. anchors: blocks per sequence. decay: slots after which a
    slot's loss counts 1/e as much."""

    prompt: Count = 256
    samples: Count = 1024
    temperatures: tuple[float, ...] = (0.0,)
    anchors: Count = 16
    decay: Annotated[float, Range(0.01, 1e6)] = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompt >= self.seq:
            raise ConfigError(f"train.seq = {self.seq}: must be above prompt, {self.prompt}", "train.seq")
        if not self.temperatures:
            raise ConfigError("train.temperatures: must not be empty", "temperatures")
        for temperature in self.temperatures:
            if not 0.0 <= temperature <= 10.0:
                raise ConfigError(f"train.temperatures = {temperature}: must be 0..10", "temperatures")


T = TypeVar("T", bound=TrainConfig)


def read(path: Path, kind: type[T], changes: dict[str, Any]) -> tuple[dict[str, Any], T]:
    """A recipe's config.json and its training, with `changes` of the command line to the latter. ConfigError names file
    or flag, and key."""
    recipe = load_json(path)
    if recipe.keys() != {"model", "train"} or not all(isinstance(part, dict) for part in recipe.values()):
        raise ConfigError(f"{path}: must be an object of two, model and train")
    flags = {f"train.{name}": f"--{name.replace('_', '-')}" for name in changes}
    return recipe["model"], build(kind, recipe["train"] | changes, f"{path}: train", flags)


def digest(*parts: Any) -> str:
    """sha256 of plain values and configs: what a checkpoint must have in common with the run that goes on from it."""
    plain = [dataclasses.asdict(part) if dataclasses.is_dataclass(part) else part for part in parts]  # type: ignore[arg-type]
    return hashlib.sha256(json.dumps(plain, sort_keys=True, default=list).encode()).hexdigest()
