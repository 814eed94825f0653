"""`kdtp train`: from a recipe to a folder as published, with its loss curve and model card."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kdtp.config import ConfigError
from kdtp.draft.dflash import config as dflash
from kdtp.model.weights import safetensors
from kdtp.model.weights.hf import SINGLE
from kdtp.text import tokenizer as tokenizers
from kdtp.text.tokenizer import Tokenizer
from kdtp.train import bpe, card, config, corpus, drafter_folder, folder, state
from kdtp.train.config import RECIPES, DrafterTrain, TargetTrain, TrainConfig
from kdtp.train.drafter import Drafter
from kdtp.train.job_drafter import DrafterJob
from kdtp.train.job_target import TargetJob, Text
from kdtp.train.loop import Job, Limits, Loop
from kdtp.train.sample import continuations
from kdtp.train.screen import Screen
from kdtp.train.target import Target

_HELD_OUT = 256  # texts to measure a drafter with


@dataclass(frozen=True)
class Options:
    """What the command line says; `changes` to the recipe's training. corpus None: Python's standard library."""

    out: Path
    recipe: Path
    corpus: Path | None
    device: str
    seed: int
    steps: int
    minutes: float
    checkpoint: int
    evaluate: int
    changes: dict[str, Any]
    command: tuple[str, ...]

    @property
    def training(self) -> Path:
        """Where the run keeps what is not part of the model."""
        return self.out / "training"


def target(options: Options) -> None:
    """Train a target. Errors as of the parts; nothing is trained before recipe, text and device are sound."""
    values, train = config.read(options.recipe, TargetTrain, options.changes)
    device = _device(options.device)
    text = corpus.read(options.corpus)
    torch.manual_seed(options.seed)
    model = folder.build(values, f"{options.recipe}: model", train.dropout).to(device)
    positions, size = model.config.max_position_embeddings, model.config.vocab_size
    if not bpe.LEAST <= size <= bpe.MOST:
        legal = f"{bpe.LEAST}..{bpe.MOST}, to train a tokenizer for it"
        raise ConfigError(f"{options.recipe}: model: vocab_size = {size}: must be {legal}", "vocab_size")
    if train.seq > positions:
        raise ConfigError(f"train.seq = {train.seq}: must be at most max_position_embeddings, {positions}", "seq")
    with _place(options), Screen("target") as screen:
        tokens = _tokenizer(options.out, text, size, screen)
        ids, held_out = corpus.encode(text.train, tokens), corpus.encode(text.held_out, tokens)
        screen.say(f"{len(ids):,} tokens to train on, {len(held_out):,} held out")
        begin, end = (tokens.controls[name] for name in (bpe.BEGIN, bpe.END))
        each = sum(len(document.text.encode()) for document in text.held_out) / len(held_out)
        job = TargetJob(model, train, Text(ids, begin, device), Text(held_out, begin, device), each)
        loop = _run(job, train, options, len(ids), [values, _digest(ids), _digest(held_out)], screen)
        folder.write(options.out, values, model, begin, end)
        _finish(
            options,
            loop,
            screen,
            "A small MLA + MoE model that writes Python",
            "A model of Kimi's layout, with experts in INT4 (groups of 32, trained for it), to show and to test"
            " speculative decoding with. It continues Python source; it knows nothing else, and what it writes is not"
            " to be trusted.",
            _text_facts(text, ids, held_out) | _run_facts(train, loop, job),
        )


def drafter(options: Options, target_folder: Path) -> None:
    """Train a drafter for the target of a folder; errors as above."""
    if options.out.resolve() == target_folder.resolve():
        raise ConfigError(f"--out = {options.out}: is the target's folder: must be another")
    recipe, train = config.read(options.recipe, DrafterTrain, options.changes)
    device = _device(options.device)
    model = folder.load(target_folder).to(device)
    tokens = tokenizers.load(target_folder, model.config.vocab_size)
    if bpe.UNKNOWN not in tokens.controls:
        raise ConfigError(f"{target_folder}: the tokenizer has no {bpe.UNKNOWN}, which is to be the mask")
    values = drafter_folder.complete(recipe, model.config, tokens.controls[bpe.UNKNOWN])
    network = dflash.parse(values, f"{options.recipe}: model")
    _check_places(train, network.block_size, model.config.max_position_embeddings)
    torch.manual_seed(options.seed)
    trained = Drafter(network).to(device)
    key = [values, *_identity(model)]
    with _place(options), Screen(f"drafter v{network.version}") as screen:
        samples, held_out = _samples(options, train, model, tokens, screen)
        job = DrafterJob(trained, model, train, samples, held_out)
        loop = _run(job, train, options, samples.numel(), [*key, _digest(samples.cpu().numpy())], screen)
        drafter_folder.write(options.out, values, trained)
        _finish(
            options,
            loop,
            screen,
            f"DFlash drafter, version {network.version}, of the small model that writes Python",
            "Drafts blocks of tokens for its target, and for no other. It cannot change what the target writes.",
            {"target": target_folder.name, "texts of the target": f"{len(samples)} of {train.seq} tokens"}
            | _run_facts(train, loop, job),
        )


def _check_places(train: DrafterTrain, block: int, positions: int) -> None:
    """A sequence has room for its blocks, also behind its prompt."""
    places = train.seq - block
    for key, value, least, most, of in (
        ("seq", train.seq, block + 1, positions, "this target and block"),
        ("prompt", train.prompt, 1, places + 1, f"seq {train.seq} and block {block}"),
        ("anchors", train.anchors, 1, places, f"seq {train.seq} and block {block}"),
    ):
        if not least <= value <= most:
            raise ConfigError(f"train.{key} = {value}: must be {least}..{most} with {of}", key)


@contextmanager
def _place(options: Options) -> Iterator[None]:
    """Make and hold the folder. ConfigError if a model is there that no run could go on with: it would be lost."""
    if (options.out / SINGLE).exists() and not (options.training / state.CHECKPOINT).exists():
        raise ConfigError(f"--out = {options.out}: has a {SINGLE}, of no run to go on with; must be a folder without")
    options.training.mkdir(parents=True, exist_ok=True)
    with state.alone(options.training):
        yield


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: this torch sees no GPU")
    return torch.device(name)


def _tokenizer(out: Path, text: corpus.Corpus, vocab_size: int, screen: Screen) -> Tokenizer:
    """The one in `out`, trained first if there is none."""
    if not (out / "tokenizer_config.json").exists():  # written last
        if (checkpoint := out / "training" / state.CHECKPOINT).exists():
            raise state.another(checkpoint)  # a drafter's
        screen.say(f"training a tokenizer of {vocab_size} tokens")
        bpe.train(out, [document.text for document in text.train], vocab_size)
    return tokenizers.load(out, vocab_size)


def _samples(
    options: Options, train: DrafterTrain, model: Target, tokens: Tokenizer, screen: Screen
) -> tuple[Tensor, Tensor]:
    """Texts to learn from and to measure with, int32 [N, seq]: kept in a file, as a run that goes on needs the same."""
    path, device = options.training / "samples.safetensors", next(model.parameters()).device
    text = corpus.read(options.corpus)
    begin = tokens.controls[bpe.BEGIN]
    key = {"seq": train.seq, "prompt": train.prompt, "samples": train.samples, "temperatures": train.temperatures}
    name = config.digest(key, options.seed, *_identity(model))
    if not path.exists() or name not in safetensors.File(path).tensors:
        if (checkpoint := options.training / state.CHECKPOINT).exists():
            raise state.another(checkpoint)  # before hours are spent, and its texts lost
        screen.say(f"the target writes {train.samples:,} texts of {train.seq} tokens, and {_HELD_OUT} to measure with")
        parts = ((text.train, train.samples, options.seed), (text.held_out, _HELD_OUT, options.seed + 1))
        made, total = [], (train.samples + _HELD_OUT) * (train.seq - train.prompt)
        for documents, count, seed in parts:
            ids = corpus.encode(documents, tokens)
            draw = torch.Generator().manual_seed(seed)
            prompts, _ = Text(ids, begin, device).drawn(count, train.prompt, draw)
            heat = torch.tensor(train.temperatures).repeat(count)[:count]
            texts = continuations(model, prompts, train.seq, heat, seed, lambda n: screen.advance(n / total))
            made.append(texts.cpu().numpy())
        stored = np.concatenate(made).astype(np.uint16)
        safetensors.write(path, {name: ("U16", stored)})
    file = safetensors.File(path)
    texts = torch.from_numpy(file.read(name).astype(np.int32)).to(device)
    file.close()
    return texts[: train.samples], texts[train.samples :]


def _run(job: Job, train: TrainConfig, options: Options, size: int, key: list[Any], screen: Screen) -> Loop:
    steps = options.steps or math.ceil(train.epochs * size / job.tokens)
    limits = Limits(steps, options.minutes, options.checkpoint, options.evaluate)
    loop = Loop(job, train, limits, options.training, options.seed, config.digest(key, train, options.seed))
    limit = f", at most {options.minutes:g} minutes" if options.minutes else ""
    screen.say(f"{steps:,} steps of {job.tokens:,} tokens{limit}, from step {loop.progress.step}")
    loop.run(screen)
    return loop


def _finish(options: Options, loop: Loop, screen: Screen, title: str, about: str, facts: Mapping[str, Any]) -> None:
    card.plot(options.out / "loss.png", loop.journal.path, title)
    facts = {"size": card.size(options.out), **facts}
    card.write(options.out / "MODEL_CARD.md", title, about, facts, shlex.join(options.command))
    screen.say(f"{options.out}: {facts['size']}; held-out {card.figures(loop.progress.figures)}")


def _text_facts(text: corpus.Corpus, ids: NDArray[np.uint16], held_out: NDArray[np.uint16]) -> dict[str, Any]:
    modules = sorted({document.module for document in text.held_out})
    return {
        "text": f"Python's standard library, {len(text.documents)} files of {text.root.name}",
        "tokens": f"{len(ids):,} to train on, {len(held_out):,} held out",
        "held-out modules": ", ".join(modules),
    }


def _run_facts(train: TrainConfig, loop: Loop, job: Job) -> dict[str, Any]:
    progress = loop.progress
    spent = f"{progress.seconds / 60:.1f} minutes on {_named(job.device)}"
    return {
        "steps": f"{progress.step:,} of {job.tokens:,} tokens, {spent}",
        "held-out": f"{card.figures(progress.figures)} (step {progress.best_step}, the best)",
        "training": card.plain(dataclasses.asdict(train)),
    }


def _named(device: torch.device) -> str:
    return torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"


def _identity(model: Target) -> tuple[dict[str, Any], str]:
    """What a target is: its configuration and its weights."""
    weights = [value.float().cpu().numpy().reshape(-1) for value in model.state_dict().values()]
    return dataclasses.asdict(model.config), _digest(np.concatenate(weights))


def _digest(values: NDArray[Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(values).tobytes()).hexdigest()


__all__ = ["RECIPES", "Options", "drafter", "target"]
