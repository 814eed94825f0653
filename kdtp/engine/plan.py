"""What an engine needs to know of its model before any process is started. No torch here: bad input fails at once."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdtp import pair
from kdtp.config import ConfigError, DrafterConfig, EngineConfig, ModelConfig
from kdtp.draft.dflash import config as dflash
from kdtp.draft.dflash.folder import Folder
from kdtp.log import amount
from kdtp.model.weights import kdtr
from kdtp.model.weights.hf import Checkpoint
from kdtp.model.weights.hf_sizes import KERNEL_INPUTS, available_memory, keeps_int4, legal_tp, weight_bytes
from kdtp.types import PAGE_ROWS, WIDE

FORMAT = "kdtp-model"
_GOLDEN = ("golden.prompt", "golden.tokens", "golden.logits")
LIBRARY = Path(__file__).parents[1] / "kernels" / "lib" / "libkdtp.so"  # as kernels.abi, which needs torch


@dataclass(frozen=True)
class Golden:
    """The continuation that the numpy reference gives: prompt ids [P], token ids [T] and the logits that chose them,
    float32 [T, V]."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: NDArray[Any]


@dataclass(frozen=True)
class Plan:
    """A checked engine: `config` with absolute paths and the KV size resolved.

    notes: what its user should be told before it is loaded, a line each.
    """

    config: EngineConfig
    model: ModelConfig
    golden: Golden | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Model:
    """What was found at the path of a model."""

    path: Path
    config: ModelConfig
    legal_tp: list[int]
    golden: Golden | None
    notes: tuple[str, ...]


def plan(config: EngineConfig) -> Plan:
    """Check `config` against its model. ConfigError, KdtrError or CheckpointError naming what is wrong and legal."""
    if config.device == "cuda":
        _check_cuda()
    path = pair.target(config.model)
    model = _folder(path, config) if os.path.isdir(path) else _file(config.model)
    if config.tp not in model.legal_tp:
        legal = ", ".join(map(str, model.legal_tp))
        raise ConfigError(f"tp = {config.tp}: {model.path.name} can be split over {legal} ranks")
    if config.drafter.name == "oracle" and model.golden is None:
        raise ConfigError(
            f"drafter = 'oracle': {model.path.name} holds no golden tokens to know; must be none, ngram or dflash"
        )
    if config.drafter.network:
        config = dataclasses.replace(config, drafter=_drafter(config, model.config))
    kv_tokens = config.pages(model.config) * PAGE_ROWS
    tokenizer = config.tokenizer and str(Path(config.tokenizer).absolute())
    resolved = dataclasses.replace(
        config, model=str(model.path), tokenizer=tokenizer, kv_tokens=kv_tokens, busy_wait=_busy_wait(config)
    )
    return Plan(resolved, model.config, model.golden, model.notes)


def _busy_wait(config: EngineConfig) -> str:
    """On or off. Where a core is not free for each process that waits, those that work wait for it."""
    if config.busy_wait != "auto":
        return config.busy_wait
    cores = len(os.sched_getaffinity(0))
    return "on" if config.device == "cuda" and config.tp > 1 and cores >= 2 * (config.tp + 1) else "off"


def _drafter(config: EngineConfig, model: ModelConfig) -> DrafterConfig:
    """The settings of a network with its block's size, once it is known to fit the model."""
    chosen, path = config.drafter, pair.drafter(config.drafter.model)
    network = dflash.read(path, chosen.amplitude or None, chosen.window)
    for key, found, want in (
        ("hidden_size", network.hidden_size, model.hidden_size),
        ("vocab_size", network.vocab_size, model.vocab_size),
        ("num_target_layers", network.num_target_layers or model.num_hidden_layers, model.num_hidden_layers),
    ):
        if found != want:
            raise ConfigError(f"{path}: {key} = {found}: the model's is {want}; this drafter is another model's", key)
    if max(network.target_layer_ids) >= model.num_hidden_layers:
        layers = model.num_hidden_layers
        raise ConfigError(f"{path}: target_layer_ids = {network.target_layer_ids}: the model has {layers} layers")
    placement = _placement(config, model)
    if placement == "workers" and config.tp not in network.legal_tp():
        legal = ", ".join(map(str, network.legal_tp()))
        raise ConfigError(f"tp = {config.tp}: the drafter {path} can be split over {legal} ranks", "tp")
    with Folder(path, network):
        block = min(chosen.block, network.block_size)
        return dataclasses.replace(chosen, model=str(path), block=block, placement=placement)


def _placement(config: EngineConfig, model: ModelConfig) -> str:
    """Where the network is; "auto" is where it drafts faster."""
    placement, cpu = config.drafter.placement, config.device == "cpu"
    if placement == "coordinator" and not cpu:
        if config.tp > 1:
            text = f"drafter.placement = {placement!r}: must be 'workers' with {config.tp} ranks on {config.device}"
            raise ConfigError(f"{text}: features stay on the GPUs that made them", "drafter.placement")
        return "workers"  # the only rank is in the coordinator's process, and the network is whole there
    # On a CPU, what is small costs less than its collectives (docs/benchmarks.md).
    small = cpu and config.tp > 1 and model.hidden_size < WIDE
    return ("coordinator" if small else "workers") if placement == "auto" else placement


def _file(path: str) -> _Model:
    with _open(path) as reader:
        if reader.metadata.get("format") != FORMAT:
            raise ConfigError(f"{reader.path}: format is {reader.metadata.get('format')!r}, must be {FORMAT!r}")
        model = ModelConfig.from_metadata(reader.metadata, str(reader.path))
        return _Model(reader.path, model, model.legal_tp(), _golden(reader, model), ())


def _folder(path: Path, config: EngineConfig) -> _Model:
    with Checkpoint(path) as checkpoint:
        notes = [f"not loaded: {', '.join(map(str, checkpoint.skipped))}"] if checkpoint.skipped else []
        legal = legal_tp(checkpoint, config.device, config.dtype)
        if not legal:
            sizes = checkpoint.model.hidden_size, checkpoint.model.moe_intermediate_size
            text = f"{path}: hidden_size, moe_intermediate_size = {sizes}: must be multiples of {KERNEL_INPUTS}"
            raise ConfigError(f"{text} for INT4 on a GPU in bfloat16; float32 takes any")
        if checkpoint.config.quantization is not None and config.tp in legal:
            notes.append(_memory(checkpoint, config))
        return _Model(path, checkpoint.model, legal, None, tuple(notes))


def _memory(checkpoint: Checkpoint, config: EngineConfig) -> str:
    """What becomes of quantised weights, and the memory that takes."""
    each = [weight_bytes(checkpoint, r, config.tp, config.device, config.dtype) for r in range(config.tp)]
    kept = checkpoint.forms["INT4"] and keeps_int4(config.device, config.dtype)
    form = "INT4 stays INT4" if kept else f"{' and '.join(checkpoint.quantized)} become {config.dtype}"
    text = f"weights: {form}, {amount(max(each))} on a rank, {amount(sum(each))} in all"
    return text if config.device != "cpu" else f"{text}; {amount(available_memory())} of memory are available"


def _check_cuda() -> None:
    if not Path("/dev/nvidiactl").exists():
        raise ConfigError("device = 'cuda': this machine has no NVIDIA driver; must be cpu")
    if not LIBRARY.is_file():
        raise ConfigError("device = 'cuda': the kernels are not built; run `kdtp build-kernels`")


def _open(model: str) -> kdtr.Reader:
    try:
        return kdtr.Reader(Path(model).absolute())
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(
            f"model = {model!r}: must be a KDTR model file or a model folder: {reason}", "model"
        ) from None


def _golden(reader: kdtr.Reader, model: ModelConfig) -> Golden | None:
    """The golden arrays, if the file has any; all three must then be what `Golden` says."""
    if not any(name in reader.entries for name in _GOLDEN):
        return None
    prompt, tokens = (_golden_ids(reader, name, model) for name in _GOLDEN[:2])
    # The last token is chosen but never run: it needs no position.
    if len(prompt) + len(tokens) - 1 > model.max_position_embeddings:
        count = f"{len(prompt)} + {len(tokens)} golden tokens"
        raise ConfigError(f"{reader.path}: {count}, but the model's context is {model.max_position_embeddings}")
    logits = np.array(reader.array("golden.logits"))
    shape = (len(tokens), model.vocab_size)
    _want_form(reader, "golden.logits", logits.dtype == np.float32 and logits.shape == shape, f"float32 {list(shape)}")
    if not np.isfinite(logits).all():
        raise ConfigError(f"{reader.path}: array 'golden.logits': holds NaN or infinity")
    return Golden(prompt, tokens, logits)


def _golden_ids(reader: kdtr.Reader, name: str, model: ModelConfig) -> tuple[int, ...]:
    ids = reader.array(name)
    # By the file's name of the dtype: a view of bfloat16 is uint16.
    integers = "int" in reader.entries[name].dtype
    _want_form(reader, name, integers and ids.ndim == 1 and ids.size > 0, "integers [1 or more]")
    bad = ids[(ids < 0) | (ids >= model.vocab_size)]
    if bad.size:
        raise ConfigError(f"{reader.path}: array {name!r}: id {bad[0]}: must be in [0, {model.vocab_size})")
    return tuple(ids.tolist())


def _want_form(reader: kdtr.Reader, name: str, ok: bool, want: str) -> None:
    if not ok:
        entry = reader.entries[name]
        found = f"{entry.dtype} {list(entry.shape)}"
        raise ConfigError(f"{reader.path}: array {name!r}: want {want}, found {found}")
