"""What weights are loaded from: an open model, in whatever files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Protocol, Self

import torch

from kdtp.config import ModelConfig

Index = tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True)
class Piece:
    """Values of a parameter in the layout of weights.table: `at` of what a rank holds. nbytes: of the file, as read."""

    at: Index
    values: torch.Tensor
    nbytes: int


@dataclass(frozen=True)
class Int4Piece:
    """INT4 values of one matrix, as the file packs them: words int32 [out, in / 8], scales bfloat16 [out, in / 32]."""

    words: torch.Tensor
    scales: torch.Tensor
    nbytes: int


class Source(AbstractContextManager["Source"], Protocol):
    """An open model. model_hash: equal on two ranks exactly if they have the same model."""

    path: Path
    config: ModelConfig
    model_hash: str

    def __enter__(self) -> Self: ...

    def legal_tp(self) -> list[int]:
        """Numbers of ranks that the model can be split over."""
        ...

    def nbytes(self, rank: int, size: int) -> int:
        """Bytes of the file that this rank reads for all parameters."""
        ...

    def check(self, rank: int, size: int) -> Iterator[None]:
        """Look at those values of this rank that could make a model that runs and is wrong, one tensor at a time.

        ValueError if one does.
        """
        ...

    def pieces(self, name: str, rank: int, size: int, device: torch.device) -> Iterator[Piece]:
        """What `rank` of `size` holds of a parameter, piece by piece, on the CPU or on the device it is for."""
        ...

    def is_int4(self, name: str) -> bool:
        """Whether the matrices of a parameter [E, in, out] are all stored as INT4."""
        ...

    def int4(self, name: str, rank: int, size: int) -> Iterator[Int4Piece]:
        """What this rank holds of such a parameter, matrix by matrix."""
        ...
