"""One rank's part of the parameters of a model, wherever they are stored."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

from kdtp import kernels
from kdtp.config import DTYPES
from kdtp.model.weights.hf_model import HfModel
from kdtp.model.weights.kdtr_model import KdtrModel
from kdtp.model.weights.source import Source
from kdtp.model.weights.table import parameters, span

Progress = Callable[[int, int], None]
CPU = torch.device("cpu")
_CHECKED = 100  # tensors looked at between two signs of life
_REPORTS = 256  # how often, at most, a loading rank says how far it is


class Weights:
    """The parameters of an open model, cut to the part of `rank` of `size`, as tensors of `dtype` on `device`.

    progress(done, total) is told the bytes taken so far; what it raises ends the loading. Raises ValueError that names
    the file for a size that does not divide the model, and as the source.
    """

    def __init__(
        self, source: Source, rank: int, size: int, dtype: str, progress: Progress, device: torch.device = CPU
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"dtype = {dtype!r}: must be one of {', '.join(DTYPES)}")
        if size not in source.legal_tp():
            raise ValueError(f"tp = {size}: {source.path} can be split over {source.legal_tp()} ranks")
        self.config = source.config
        self.rank, self.size = rank, size
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.device = device
        self.model_hash = source.model_hash
        self._source = source
        self._table = parameters(self.config)
        self._progress = progress
        self._done = self._told = 0
        self._total = source.nbytes(rank, size)
        for count, _ in enumerate(source.check(rank, size)):
            if count % _CHECKED == 0:  # this takes a while: it must not look like a load that hangs
                progress(0, self._total)

    @property
    def vocab_start(self) -> int:
        """First token id of this rank."""
        return span(self.config.vocab_size, self.rank, self.size)[0]

    def take(self, name: str) -> torch.Tensor:
        """This rank's part of a parameter."""
        shape, dtype = self._shape(name), self._dtype(name)
        return self._filled(torch.empty(shape, dtype=dtype, device=self.device), (name,))

    def matrix(self, *names: str) -> torch.Tensor:
        """This rank's parts of matrices [.., in, out], one beside the other, laid out as kernels.empty_weight does.

        Filled piece by piece: it takes no more memory than the result and one piece.
        """
        shape = (*self._shape(names[0])[:-1], self._width(names))
        return self._filled(kernels.empty_weight(shape, self._dtype(names[0]), self.device), names)

    def keeps_int4(self, *names: str) -> bool:
        """Whether `int4` gives these parameters; only a GPU's kernels read INT4, and only with bfloat16."""
        able = self.device.type == "cuda" and self.dtype == torch.bfloat16
        return able and all(self._source.is_int4(name) for name in names)

    def int4(self, *names: str) -> tuple[torch.Tensor, torch.Tensor]:
        """As `matrix` of [E, in, out], in INT4: words int32 [E, out, in / 8] and scales bfloat16 [E, out, in / 32]."""
        experts, inputs, _ = self._shape(names[0])
        wide = self._width(names)
        words = torch.empty(experts, wide, inputs // 8, dtype=torch.int32, device=self.device)
        scales = torch.empty(experts, wide, inputs // 32, dtype=torch.bfloat16, device=self.device)
        first = 0
        for name in names:
            last = first + self._shape(name)[-1]
            for expert, piece in enumerate(self._source.int4(name, self.rank, self.size)):
                words[expert, first:last].copy_(piece.words)
                scales[expert, first:last].copy_(piece.scales)
                self._advance(piece.nbytes)
            first = last
        return words, scales

    def _filled(self, whole: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
        first = 0
        for name in names:
            target = whole.narrow(-1, first, self._shape(name)[-1])
            first += target.shape[-1]
            for piece in self._source.pieces(name, self.rank, self.size, self.device):
                _copy(target[piece.at], piece.values.to(whole.dtype))
                self._advance(piece.nbytes)
        return whole

    def _dtype(self, name: str) -> torch.dtype:
        return torch.float32 if self._table[name].exact else self.dtype

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._table[name].held(self.rank, self.size)

    def _width(self, names: tuple[str, ...]) -> int:
        return sum(self._shape(name)[-1] for name in names)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self._done == self._total or self._done - self._told > self._total // _REPORTS:
            self._told = self._done
            self._progress(self._done, self._total)


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    # A K-major target is contiguous the other way round; so are the matrices of a checkpoint, which makes it one copy.
    if target.dim() > 1 and target.stride(-2) == 1:
        target.mT.copy_(values.mT)
    else:
        target.copy_(values.contiguous())  # torch turns a matrix fast if it may go to a place of its own


def open_model(path: str | os.PathLike[str]) -> Source:
    """The model in a KDTR file, or in a folder as published. Errors as KdtrModel and HfModel; OSError."""
    return HfModel(path) if os.path.isdir(path) else KdtrModel(path)
