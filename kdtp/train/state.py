"""A run's checkpoint: one safetensors file, replaced at once, so that there is always a whole one."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdtp.config import ConfigError
from kdtp.model.weights import safetensors

CHECKPOINT = "checkpoint.safetensors"
_PLAIN = "state.json"  # among the tensors: bytes


def write(path: Path, tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> None:
    """Store float32 tensors and plain values. If that fails, OSError names the file, and the one before stays."""
    text = np.frombuffer(json.dumps(plain).encode(), np.uint8)
    stored = {name: ("F32", tensor.detach().float().cpu().numpy()) for name, tensor in tensors.items()}
    safetensors.write(path, {_PLAIN: ("U8", text), **stored})


def read(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What was stored. CheckpointError for a broken file, ConfigError unless it was stored with this `key`."""
    file = safetensors.File(path)
    if _PLAIN not in file.tensors:
        raise ConfigError(f"{path}: is no checkpoint of a training run: it has no {_PLAIN}")
    plain = json.loads(file.read(_PLAIN).tobytes())
    if plain.get("key") != key:
        raise another(path)
    tensors = {name: torch.from_numpy(file.read(name)) for name in file.tensors if name != _PLAIN}
    file.close()
    return tensors, plain


def another(path: Path) -> ConfigError:
    """What to raise for a file of a run that is not the one which is asked for."""
    return ConfigError(
        f"{path}: is of a run with another recipe, seed, size of batch, text or target: go on with those, or take"
        " another --out"
    )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Hold the folder of a run, as long as the process lives. ConfigError while another one does."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another process is training here; take another --out, or wait") from None
        yield
