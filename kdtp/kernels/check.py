"""What every op asks of its tensors before it runs."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.bfloat16)
FLOAT32 = (torch.float32,)
INDEX = (torch.int64,)


def check(op: str, name: str, x: torch.Tensor, dtypes: tuple[torch.dtype, ...], *dims: int | None) -> None:
    """Raise unless `x` is a CPU tensor of one of `dtypes` and of shape `dims` (None: any size).

    Raises NotImplementedError for another device, TypeError for a dtype, ValueError for a shape; each names op and
    tensor.
    """
    if not x.is_cpu:
        raise NotImplementedError(f"{op}: {name} is on {x.device}: this op has only a CPU form")
    if x.dtype not in dtypes:
        raise TypeError(f"{op}: {name} is {x.dtype}: must be {' or '.join(map(str, dtypes))}")
    shape = x.shape
    if len(shape) == len(dims):
        for size, want in zip(shape, dims):  # noqa: B905 - hot: some 40 checks per layer
            if want is not None and want != size:
                break
        else:
            return
    legal = ", ".join("*" if d is None else str(d) for d in dims)
    raise ValueError(f"{op}: {name} has shape {list(shape)}: must be [{legal}]")


def check_at(
    op: str, device: torch.device, name: str, x: torch.Tensor, dtype: torch.dtype, *dims: int | None
) -> torch.Size:
    """The shape of `x`, which must be a contiguous tensor there, of this dtype and of shape `dims` (None: any size).

    Raises TypeError for a dtype, ValueError for the rest; each names op and tensor.
    """
    if x.device != device:
        raise ValueError(f"{op}: {name} is on {x.device}: must be on {device}")
    if x.dtype != dtype:
        raise TypeError(f"{op}: {name} is {x.dtype}: must be {dtype}")
    if len(x.shape) != len(dims) or any(d not in (None, size) for d, size in zip(dims, x.shape, strict=True)):
        legal = ", ".join("*" if d is None else str(d) for d in dims)
        raise ValueError(f"{op}: {name} has shape {list(x.shape)}: must be [{legal}]")
    if not x.is_contiguous():
        raise ValueError(f"{op}: {name} has strides {list(x.stride())}: must be contiguous")
    return x.shape


def check_rows(op: str, rows: int, padded: int) -> None:
    """Raise ValueError unless the op's `rows` rows are within the `padded` ones of its input."""
    if rows > padded:
        raise ValueError(f"{op}: x has {padded} rows, and {rows} of them are asked for")
