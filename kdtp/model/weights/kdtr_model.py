"""The model in a KDTR file, as a source of weights."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from typing import Self

import numpy as np
import torch

from kdtp.config import ModelConfig
from kdtp.model.weights.kdtr import Reader
from kdtp.model.weights.source import Int4Piece, Piece
from kdtp.model.weights.table import parameters


class KdtrModel:
    """An open KDTR file that holds a model: float32 parameters, named as in weights.table.

    Raises KdtrError for a file that is not sound, ValueError that names it for one that is no model, and for an array
    that is missing, unknown, or of another shape or dtype.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._reader = reader = Reader(path)
        self.path = reader.path
        kind = reader.metadata.get("format")
        if kind != "kdtp-model":
            raise ValueError(f"{reader.path}: format: want 'kdtp-model', found {kind!r}")
        self.config = ModelConfig.from_metadata(reader.metadata, str(reader.path))
        self.model_hash = _digest(reader)
        self._table = parameters(self.config)
        self._check()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def legal_tp(self) -> list[int]:
        """As Source."""
        return self.config.legal_tp()

    def nbytes(self, rank: int, size: int) -> int:
        """As Source: an array is checked as a whole, so every rank reads all of it."""
        return sum(self._reader.entries[name].nbytes for name in self._table)

    def check(self, rank: int, size: int) -> Iterator[None]:
        """As Source: nothing; every array is checked by its checksum when it is read."""
        yield from ()

    def pieces(self, name: str, rank: int, size: int, device: torch.device) -> Iterator[Piece]:
        """As Source."""
        part = self._reader.array(name)[self._table[name].part(rank, size)]
        yield Piece((...,), torch.from_numpy(np.array(part)), self._reader.entries[name].nbytes)

    def is_int4(self, name: str) -> bool:
        """As Source: never."""
        return False

    def int4(self, name: str, rank: int, size: int) -> Iterator[Int4Piece]:
        """As Source."""
        raise AssertionError(f"{name}: a KDTR file holds no INT4")

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
