"""One rank's part of the parameters of a KDTR model file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

import numpy as np
import torch

from kdtp.config import DTYPES, ModelConfig
from kdtp.model.weights.kdtr import Reader
from kdtp.model.weights.table import parameters, span

Progress = Callable[[int, int], None]
CPU = torch.device("cpu")


class Weights:
    """The parameters of an open model file, cut to the part of `rank` of `size`, as tensors of `dtype`.

    progress(done, total) is told the bytes taken so far; what it raises ends the loading. Raises ValueError that names
    the file: for a file that is no model, an array that is missing, unknown or of another shape or dtype, and a size
    that does not divide the model.
    """

    def __init__(
        self, reader: Reader, rank: int, size: int, dtype: str, progress: Progress, device: torch.device = CPU
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype = {dtype!r}: must be one of {', '.join(DTYPES)}")
        kind = reader.metadata.get("format")
        if kind != "kdtp-model":
            raise ValueError(f"{reader.path}: format: want 'kdtp-model', found {kind!r}")
        self.config = ModelConfig.from_metadata(reader.metadata, str(reader.path))
        if size not in self.config.legal_tp():
            raise ValueError(f"tp = {size}: {reader.path} can be split over {self.config.legal_tp()} ranks")
        self.rank, self.size = rank, size
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = device
        self.model_hash = _digest(reader)
        self._reader = reader
        self._table = parameters(self.config)
        self._progress = progress
        self._done = 0
        self._check()
        self._total = sum(reader.entries[name].nbytes for name in self._table)

    @property
    def vocab_start(self) -> int:
        """First token id of this rank."""
        return span(self.config.vocab_size, self.rank, self.size)[0]

    def take(self, name: str) -> torch.Tensor:
        """This rank's part of a parameter, as a tensor of its own."""
        param = self._table[name]
        part = self._reader.array(name)[param.part(self.rank, self.size)]
        tensor = torch.from_numpy(np.array(part)).to(torch.float32 if param.exact else self.dtype)
        self._done += self._reader.entries[name].nbytes
        self._progress(self._done, self._total)
        return tensor.to(self.device)

    def _check(self) -> None:
        path, entries = self._reader.path, self._reader.entries
        extra = [name for name in entries if name not in self._table and not name.startswith("golden.")]
        if extra:
            raise ValueError(f"{path}: array {extra[0]!r} is no parameter of this model ({len(extra)} such)")
        for name, param in self._table.items():
            if name not in entries:
                raise ValueError(f"{path}: array {name!r}: want float32 {list(param.shape)}, found none")
            found = entries[name]
            if (found.dtype, found.shape) != ("float32", param.shape):
                want = f"float32 {list(param.shape)}"
                raise ValueError(f"{path}: array {name!r}: want {want}, found {found.dtype} {list(found.shape)}")


def _digest(reader: Reader) -> str:
    """sha256 of metadata and array table, checksums included: equal exactly if the content is."""
    table = [[e.name, e.dtype, e.shape, e.crc32] for e in reader.entries.values()]
    return hashlib.sha256(json.dumps([reader.metadata, table], sort_keys=True).encode()).hexdigest()
