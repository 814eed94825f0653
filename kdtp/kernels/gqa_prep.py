"""Between the projections of a GQA layer with normed heads and its attention."""

from __future__ import annotations

from functools import partial

import torch

from kdtp.kernels.abi import DTYPES, Fields, library
from kdtp.kernels.check import FLOATS, check_at
from kdtp.kernels.norm import rms_norm


def gqa_prep(
    q: torch.Tensor,
    kv: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm each head of the queries and keys, and rotate it: NeoX order, pair j is entries j and j + d / 2.

    q [M, h, d], kv [M, 2 * kv, d] (keys, then values), float32 or bfloat16 alike; weights float32 [d]; cos, sin float32
    [M, d / 2] -> queries [M, h, d], and keys and values, one behind the other, [2, M, kv, d]. What is normed is rounded
    to the dtype before it is rotated. Raises TypeError for a dtype, ValueError for another form, KernelError for a size
    beyond csrc/params.h.
    """
    rows, _, width = _check_kv(kv, k_weight, cos, sin)
    check = partial(check_at, "gqa_prep", kv.device)
    heads = check("q", q, kv.dtype, rows, None, width)[1]
    check("q_weight", q_weight, torch.float32, width)
    if kv.is_cuda:
        turned = torch.empty_like(q)
        queries: Fields = {"q": q, "q_weight": q_weight, "q_out": turned, "heads": heads}
        return turned, _in_cuda(kv, k_weight, eps, cos, sin, queries)
    return _turned(q, q_weight, eps, cos, sin), _keys_values(kv, k_weight, eps, cos, sin)


def gqa_prep_kv(
    kv: torch.Tensor, k_weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """As gqa_prep, keys and values only."""
    _check_kv(kv, k_weight, cos, sin)
    return (_in_cuda if kv.is_cuda else _keys_values)(kv, k_weight, eps, cos, sin)


def _check_kv(kv: torch.Tensor, k_weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Size:
    if kv.dtype not in FLOATS:
        raise TypeError(f"gqa_prep: kv is {kv.dtype}: must be {' or '.join(map(str, FLOATS))}")
    check = partial(check_at, "gqa_prep", kv.device)
    rows, heads, width = shape = check("kv", kv, kv.dtype, None, None, None)
    if heads % 2 or width % 2:
        raise ValueError(f"gqa_prep: kv has shape {list(shape)}: heads and their width must be even")
    check("k_weight", k_weight, torch.float32, width)
    check("cos", cos, torch.float32, rows, width // 2)
    check("sin", sin, torch.float32, rows, width // 2)
    return shape


def _in_cuda(
    kv: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    queries: Fields | None = None,
) -> torch.Tensor:
    rows, heads, width = kv.shape
    made = kv.new_empty(2, rows, heads // 2, width)
    tensors: Fields = {"kv": kv, "k_weight": k_weight, "cos": cos, "sin": sin, "kv_out": made, **(queries or {})}
    shape: Fields = {"rows": rows, "kv_heads": heads // 2, "width": width}
    stream = torch.cuda.current_stream(kv.device).cuda_stream
    library().call("gqa_prep", stream, **tensors, **shape, eps=eps, dtype=DTYPES[kv.dtype])
    return made


def _keys_values(
    kv: torch.Tensor, k_weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    keys, values = kv.chunk(2, 1)
    return torch.stack([_turned(keys, k_weight, eps, cos, sin), values])


def _turned(x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    normed = rms_norm(x.reshape(-1, x.shape[2]), weight, eps).view(x.shape)
    first, second = normed.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)
