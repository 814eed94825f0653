"""The model in a published folder, as a source of weights: what is stored as FP8 or INT4 becomes values here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from kdtp.model.weights.hf import Checkpoint
from kdtp.model.weights.hf_config import Fp8, Int4
from kdtp.model.weights.hf_table import Origin
from kdtp.model.weights.source import Index, Int4Piece, Piece

_LARGEST_PIECE = 1 << 24  # bytes: an embedding is 2 GB, and FP8 takes nine times its size while it becomes float32
_FP8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
# By byte, the two INT4 values in it, the lower half first, as one 8-byte word: looked up, they come twice as fast.
_INT4_PAIRS = np.stack([np.arange(256) % 16 - 8, np.arange(256) // 16 - 8], -1).astype(np.float32).view(np.uint64)[:, 0]


class HfModel:
    """An open model folder; errors as Checkpoint."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._checkpoint = Checkpoint(Path(path))
        self.path = self._checkpoint.path
        self.config = self._checkpoint.model
        self.model_hash = self._checkpoint.model_hash

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._checkpoint.close()

    def legal_tp(self) -> list[int]:
        """As Source."""
        return self._checkpoint.legal_tp()

    def nbytes(self, rank: int, size: int) -> int:
        """As Source."""
        groups = self._checkpoint.origins.values()
        return sum(self._checkpoint.nbytes_of(origin, rank, size) for group in groups for origin in group)

    def check(self, rank: int, size: int) -> Iterator[None]:
        """As Source: scales that are no numbers, INT4 matrices that are said to be of another shape."""
        for origin in (origin for group in self._checkpoint.origins.values() for origin in group):
            form = self._checkpoint.form(origin)
            if form == "plain":
                continue
            if form == "fp8":
                self._check_scales(f"{origin.tensor}_scale_inv")
            else:
                _, scale, shape = self._checkpoint.parts(origin)
                said = tuple(self._checkpoint.read(shape).tolist())
                if said != origin.shape:
                    self._checkpoint.complain(shape, "values", list(origin.shape), list(said))
                self._check_scales(scale, origin.rows(rank, size), _groups(origin.columns(rank, size)))
            yield

    def _check_scales(self, *place: Any) -> None:
        scales = self._scales(*place)
        bad = (~scales.isfinite()).nonzero().tolist()
        if bad:
            found = f"{scales[tuple(bad[0])].item()} ({len(bad)} such)"
            self._checkpoint.complain(place[0], "scales", "finite numbers", found)

    def pieces(self, name: str, rank: int, size: int, device: torch.device) -> Iterator[Piece]:
        """As Source: an expert's matrix in one piece, large ones in several. FP8 becomes values on the device."""
        for expert, origin in enumerate(self._checkpoint.origins[name]):
            rows, columns = origin.rows(rank, size), origin.columns(rank, size)
            nbytes, count = self._checkpoint.nbytes_of(origin, rank, size), _count(rows)
            each = max(1, count * _LARGEST_PIECE // max(nbytes, 1)) if not origin.per_head else count
            for first in range(0, count, each):
                last = min(first + each, count)
                values = self._values(origin, _part(rows, first, last), columns, device)
                if origin.per_head:
                    values = values.view(-1, origin.per_head, values.shape[1])
                part: Index = (..., slice(first, last)) if origin.turned else (slice(first, last),)
                at = (expert, slice(None), slice(first, last)) if ".experts." in name else part
                read = nbytes * last // count - nbytes * first // count
                yield Piece((...,) if origin.per_head else at, values.mT if origin.turned else values, read)

    def is_int4(self, name: str) -> bool:
        """As Source."""
        return all(self._checkpoint.form(origin) == "int4" for origin in self._checkpoint.origins[name])

    def int4(self, name: str, rank: int, size: int) -> Iterator[Int4Piece]:
        """As Source."""
        for origin in self._checkpoint.origins[name]:
            words, scales = self._int4(origin, origin.rows(rank, size), origin.columns(rank, size))
            yield Int4Piece(words, scales, self._checkpoint.nbytes_of(origin, rank, size))

    def _values(self, origin: Origin, rows: slice | np.ndarray, columns: slice, device: torch.device) -> torch.Tensor:
        """Some rows and columns of an origin's matrix, or some of its vector."""
        form = self._checkpoint.form(origin)
        if form == "int4":
            return unpacked(*self._int4(origin, rows, columns))
        values = self._read(origin.tensor, rows, columns)
        return values if form == "plain" else self._scaled(origin, values.to(device), rows, columns)

    def _read(self, name: str, rows: slice | np.ndarray = slice(None), columns: slice = slice(None)) -> torch.Tensor:
        """bfloat16 as such, FP8 as its bits."""
        values = torch.from_numpy(self._checkpoint.read(name, rows, columns))
        return values.view(torch.bfloat16) if self._checkpoint.stored(name).dtype == "BF16" else values

    def _scaled(self, origin: Origin, bits: torch.Tensor, rows: slice | np.ndarray, columns: slice) -> torch.Tensor:
        """FP8 blocks times their scales, float32. The scales multiply, despite their name."""
        name, block = f"{origin.tensor}_scale_inv", self._checkpoint.config.quantization
        assert isinstance(block, Fp8)
        of_rows = np.arange(origin.shape[0])[rows] // block.rows
        scales = self._scales(name)[torch.from_numpy(of_rows)].to(bits.device)
        values = _FP8_VALUES.to(bits.device).index_select(0, bits.view(-1).int()).view(bits.shape)
        for column in range(columns.start // block.columns, -(-columns.stop // block.columns)):
            first = max(column * block.columns, columns.start) - columns.start
            last = min((column + 1) * block.columns, columns.stop) - columns.start
            values[:, first:last] *= scales[:, column, None]
        return values

    def _int4(self, origin: Origin, rows: slice | np.ndarray, columns: slice) -> tuple[torch.Tensor, torch.Tensor]:
        packed, scale, _ = self._checkpoint.parts(origin)
        words = self._read(packed, rows, slice(columns.start // 8, columns.stop // 8))
        return words, self._scales(scale, rows, _groups(columns))

    def _scales(self, name: str, rows: slice | np.ndarray = slice(None), columns: slice = slice(None)) -> torch.Tensor:
        return self._read(name, rows, columns)


def _groups(columns: slice) -> slice:
    return slice(columns.start // Int4.GROUP, columns.stop // Int4.GROUP)


def _count(rows: slice | np.ndarray) -> int:
    return int(rows.stop - rows.start) if isinstance(rows, slice) else len(rows)


def _part(rows: slice | np.ndarray, first: int, last: int) -> slice | np.ndarray:
    return slice(rows.start + first, rows.start + last) if isinstance(rows, slice) else rows[first:last]


def unpacked(words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [out, in] of INT4 as published: words int32 [out, in / 8], lowest bits first, each nibble the value + 8;
    scales [out, in / 32]."""
    pairs = _INT4_PAIRS.take(words.contiguous().numpy().view(np.uint8)).view(np.float32)
    values = torch.from_numpy(pairs).view(words.shape[0], -1, Int4.GROUP)
    return (values * scales.float()[..., None]).flatten(1)
