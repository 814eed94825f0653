"""One rank's part of the parameters of a published DFlash drafter."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch

from kdtp import kernels
from kdtp.draft.dflash.config import DFlashConfig
from kdtp.draft.dflash.folder import Folder


class Weights:
    """The parameters in a drafter's folder, cut to the part of `rank` of `size`, in `dtype` on `device`.

    Raises CheckpointError as Folder, and for NaN or infinity: one such value, and no draft is ever taken, without a
    word. ValueError for a size that does not divide the drafter.
    """

    def __init__(
        self, path: Path, config: DFlashConfig, rank: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        if size not in config.legal_tp():
            raise ValueError(f"tp = {size}: {path} can be split over {config.legal_tp()} ranks")
        self.config, self.dtype, self.device = config, dtype, device
        self._rank, self._size = rank, size
        self._folder = Folder(path, config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._folder.__exit__(*exception)

    def take(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """This rank's part of a parameter, as stored."""
        param, (file, stored) = self._folder.table[name], self._folder.where[name]
        cut = [slice(None), slice(None)]
        if param.axis is not None:
            each = param.shape[param.axis] // self._size
            cut[param.axis] = slice(self._rank * each, (self._rank + 1) * each)
        values = file.read(stored.name, *cut)
        tensor = (
            torch.from_numpy(values.view("<i2")).view(torch.bfloat16)
            if stored.dtype == "BF16"
            else torch.from_numpy(values)
        )
        tensor = tensor.to(self.device, dtype or self.dtype)
        if not torch.stack(tensor.aminmax()).isfinite().all():  # NaN comes through; no mask as large as the tensor
            bad = tensor[~tensor.isfinite()]
            kind = str(tensor.dtype).removeprefix("torch.")
            self._folder.complain(name, "values", "finite numbers", f"{bad[0].item()} ({len(bad)} such, in {kind})")
        return tensor

    def exact(self, name: str) -> torch.Tensor:
        """As `take`, float32 whatever the dtype: norms."""
        return self.take(name, torch.float32)

    def matrix(self, *names: str) -> torch.Tensor:
        """Parts of matrices, one beside the other: [in, out], as kernels.linear takes them."""
        values = torch.cat([self.take(name) for name in names]).T
        return kernels.empty_weight(values.shape, values.dtype, values.device).copy_(values)

    def bias(self, *names: str) -> torch.Tensor | None:
        """Parts of biases, one beside the other; None in a drafter without."""
        return torch.cat([self.take(name) for name in names]) if self.config.attention_bias else None
