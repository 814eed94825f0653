"""The CUDA form of every op: checks are the library's own, results are new tensors on the current stream.

Weights of a product, [.., in, out], are K-major in memory, as kernels.empty_weight makes room for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from kdtp.kernels.abi import DTYPES, Fields, KernelError, library

if TYPE_CHECKING:
    from kdtp.kernels.router import Routing

SPLIT = 512  # positions per split of the attention: fixed, so that a row's sums are too
_SCORING = {"softmax": 0, "sigmoid": 1}


@dataclass(frozen=True)
class Tables:
    """Where the rows of a ragged batch find their keys; int32 tensors named as in csrc/params.h (mla_tree)."""

    row_seq: torch.Tensor
    row_depth: torch.Tensor
    path: torch.Tensor
    starts: torch.Tensor
    first_row: torch.Tensor
    pages: torch.Tensor
    max_start: int


def _k_major(op: str, w: torch.Tensor) -> None:
    if not w.transpose(-1, -2).is_contiguous():
        raise KernelError(f"{op}: w {list(w.shape)} with strides {w.stride()}: must be K-major (kernels.empty_weight)")


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _dtype(op: str, x: torch.Tensor) -> int:
    if x.dtype not in DTYPES:
        raise KernelError(f"{op}: {x.dtype}: must be float32 or bfloat16")
    return DTYPES[x.dtype]


def _run(op: str, fields: Fields, device: torch.device) -> None:
    """Run an op, with as much scratch memory as the library says, if it wants any."""
    lib = library()
    if hasattr(lib.structs[op], "workspace"):
        size = lib.workspace(op, lib.arguments(op, **fields))
        space = torch.empty(max(size, 16), dtype=torch.uint8, device=device)
        fields = fields | {"workspace": space, "workspace_bytes": space.numel()}
    lib.call(op, _stream(), **fields)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """As kernels.rms_norm; with `residual` [M, H], x is added to it in place first and the sum is normed."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    shape: Fields = {"rows": x.shape[0], "width": x.shape[1], "x_stride": x.stride(0), "dtype": _dtype("rms_norm", x)}
    fields: Fields = {"x": x, "residual": residual, "weight": weight, "out": out, "eps": eps} | shape
    _run("rms_norm", fields, x.device)
    return out


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    """As kernels.silu_mul."""
    out = x.new_empty(x.shape[0], x.shape[1] // 2)
    fields: Fields = {"x": x, "out": out, "rows": x.shape[0], "width": out.shape[1], "dtype": _dtype("silu_mul", x)}
    _run("silu_mul", fields, x.device)
    return out


def embedding(ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
    """As kernels.embedding."""
    out = weight.new_empty(ids.shape[0], weight.shape[1])
    vocab, width = weight.shape
    shape: Fields = {"rows": ids.shape[0], "vocab": vocab, "width": width, "first": first}
    fields: Fields = {"ids": ids, "weight": weight, "out": out, "dtype": _dtype("embedding", weight)} | shape
    _run("embedding", fields, weight.device)
    return out


def linear(x: torch.Tensor, w: torch.Tensor, out_f32: bool = False) -> torch.Tensor:
    """As kernels.linear, for w K-major; out_f32: the sums as they are, float32."""
    _k_major("linear", w)
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(x.shape[0], w.shape[1], dtype=torch.float32 if out_f32 else x.dtype, device=x.device)
    shape: Fields = {
        "rows": x.shape[0],
        "in": w.shape[0],
        "out": w.shape[1],
        "x_stride": x.stride(0),
        "y_stride": w.shape[1],
    }
    fields: Fields = {"x": x, "w": w, "y": y, "out_f32": int(out_f32), "dtype": _dtype("linear", x)} | shape
    _run("linear", fields, x.device)
    return y


def linear_heads(x: torch.Tensor, w: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """As kernels.linear_heads, for w K-major; `out` [M, h, out] may be a strided view."""
    _k_major("linear_heads", w)
    y = out if out is not None else x.new_empty(x.shape[0], w.shape[0], w.shape[2])
    strides: Fields = {"x_row": x.stride(0), "x_head": x.stride(1), "y_row": y.stride(0), "y_head": y.stride(1)}
    shape: Fields = {"rows": x.shape[0], "heads": w.shape[0], "in": w.shape[1], "out": w.shape[2]}
    fields: Fields = {"x": x, "w": w, "y": y, "dtype": _dtype("linear_heads", x)} | shape | strides
    _run("linear_heads", fields, x.device)
    return y


def router(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing, kv_rows: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As kernels.router; ids are int32."""
    ids = torch.empty(logits.shape[0], routing.topk, dtype=torch.int32, device=logits.device)
    weights = torch.empty_like(ids, dtype=torch.float32)
    shape: Fields = {"rows": logits.shape[0], "experts": logits.shape[1], "topk": routing.topk}
    rule: Fields = {
        "groups": routing.n_group,
        "topk_group": routing.topk_group,
        "scoring": _SCORING[routing.scoring_func],
    }
    last: Fields = {"norm": int(routing.norm_topk_prob), "scale": routing.scale}
    tensors: Fields = {"logits": logits, "bias": bias, "kv_rows": kv_rows, "ids": ids, "weights": weights}
    fields: Fields = tensors | shape | rule | last
    _run("router", fields, logits.device)
    return ids, weights


def moe(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    add: torch.Tensor | None = None,
    ready: torch.cuda.Event | None = None,
) -> torch.Tensor:
    """As kernels.moe for M = M', ids int32, experts K-major. `ready`, on another stream: `add` is there after it."""
    for w in (w_gate_up, w_down):
        _k_major("moe", w)
    out = torch.empty_like(x)
    shape: Fields = {"rows": x.shape[0], "hidden": x.shape[1], "inter": w_down.shape[1], "experts": w_down.shape[0]}
    tensors: Fields = {"ids": ids, "weights": weights, "w_gate_up": w_gate_up, "w_down": w_down, "out": out}
    rest: Fields = {"topk": ids.shape[1], "format": 0, "dtype": _dtype("moe", x)}
    fields: Fields = {"x": x} | rest | shape | tensors | _added("moe", add, ready, x)
    _run("moe", fields, x.device)
    return out


def moe_int4(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    w_gate_up: torch.Tensor,
    s_gate_up: torch.Tensor,
    w_down: torch.Tensor,
    s_down: torch.Tensor,
    add: torch.Tensor | None = None,
    ready: torch.cuda.Event | None = None,
) -> torch.Tensor:
    """As `moe` for x bfloat16 [M, H], with INT4 experts as `repack` gives them, gate and up as one matrix."""
    experts, inter = w_gate_up.shape[0], w_gate_up.shape[1] // 2
    _int4("moe_int4", w_gate_up, s_gate_up, experts, 2 * inter, x.shape[1])
    _int4("moe_int4", w_down, s_down, experts, x.shape[1], inter)
    out = torch.empty_like(x)
    shape: Fields = {"rows": x.shape[0], "hidden": x.shape[1], "inter": inter, "experts": experts}
    tensors: Fields = {"w_gate_up": w_gate_up, "s_gate_up": s_gate_up, "w_down": w_down, "s_down": s_down, "out": out}
    routing: Fields = {"ids": ids, "weights": weights, "topk": ids.shape[1]} | _added("moe_int4", add, ready, x)
    fields: Fields = {"x": x, "format": 1, "dtype": _dtype("moe_int4", x)} | shape | tensors | routing
    _run("moe", fields, x.device)
    return out


def repack(packed: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """INT4 experts from the published packing to the kernel's own; shapes stay, places within an expert do not.

    packed int32 [E, out, in / 8], lowest bits first; scales bfloat16 [E, out, in / 32].
    """
    experts, out, words = packed.shape
    _int4("repack", packed, scales, experts, out, 8 * words)
    packed_out, scales_out = torch.empty_like(packed), torch.empty_like(scales)
    shape: Fields = {"experts": experts, "out": out, "in": 8 * words}
    tensors: Fields = {"packed": packed, "scales": scales, "packed_out": packed_out, "scales_out": scales_out}
    _run("moe_repack", tensors | shape, packed.device)
    return packed_out, scales_out


def _added(op: str, add: torch.Tensor | None, ready: torch.cuda.Event | None, x: torch.Tensor) -> Fields:
    if add is not None and (add.shape, add.dtype, add.is_contiguous()) != (x.shape, x.dtype, True):
        raise KernelError(f"{op}: add {list(add.shape)} {add.dtype}: must be {list(x.shape)} {x.dtype}, contiguous")
    return {"add": add, "add_ready": None if ready is None else ready.cuda_event}


def _int4(op: str, packed: torch.Tensor, scales: torch.Tensor, *shape: int) -> None:
    experts, out, inputs = shape
    found = (packed.dtype, tuple(packed.shape), scales.dtype, tuple(scales.shape))
    want = (torch.int32, (experts, out, inputs // 8), torch.bfloat16, (experts, out, inputs // 32))
    if found != want or not (packed.is_contiguous() and scales.is_contiguous()):
        raise KernelError(f"{op}: packed and scales are {found}: must be {want}, contiguous")


def mla_prep(
    q: torch.Tensor,
    kv_new: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_rows: torch.Tensor,
    kv: torch.Tensor,
) -> torch.Tensor:
    """Writes the KV rows, and gives [M, h, lora + rope] whose rope part is the rotated query's; see csrc/params.h."""
    rows, heads, width = q.shape
    lora, rope = weight.shape[0], 2 * cos.shape[1]
    absorbed = q.new_empty(rows, heads, lora + rope)
    shape: Fields = {"rows": rows, "heads": heads, "nope": width - rope, "rope": rope, "lora": lora}
    tensors: Fields = {"cos": cos, "sin": sin, "kv_rows": kv_rows, "absorbed": absorbed, "kv": kv, "weight": weight}
    strides: Fields = {"q_stride": q.stride(0), "kv_stride": kv_new.stride(0)}
    fields: Fields = {"q": q, "kv_new": kv_new, "eps": eps, "dtype": _dtype("mla_prep", q)} | shape | tensors | strides
    _run("mla_prep", fields, q.device)
    return absorbed


def mla_tree(q: torch.Tensor, kv: torch.Tensor, tables: Tables, scale: float, kv_lora_rank: int) -> torch.Tensor:
    """As kernels.mla_tree, over page tables."""
    rows, heads, width = q.shape
    out = q.new_empty(rows, heads, kv_lora_rank)
    shape: Fields = {
        "rows": rows,
        "seqs": tables.starts.shape[0],
        "heads": heads,
        "lora": kv_lora_rank,
        "rope": width - kv_lora_rank,
        "max_depth": tables.path.shape[1],
        "max_pages": tables.pages.shape[1],
        "max_start": tables.max_start,
        "split": SPLIT,
    }
    names = ("row_seq", "row_depth", "path", "starts", "first_row", "pages")
    where: Fields = {name: getattr(tables, name) for name in names}
    fields: Fields = {"q": q, "kv": kv, "out": out, "scale": scale, "dtype": _dtype("mla_tree", q)} | shape | where
    _run("mla_tree", fields, q.device)
    return out


def argmax(logits: torch.Tensor, vocab_start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's maximum, float32 [R], and the lowest global id that has it, int64 [R]."""
    values = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    ids = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    shape: Fields = {
        "rows": logits.shape[0],
        "vocab": logits.shape[1],
        "stride": logits.stride(0),
        "vocab_start": vocab_start,
    }
    fields: Fields = {"logits": logits, "values": values, "ids": ids} | shape
    _run("argmax", fields, logits.device)
    return values, ids


def topk_logsumexp(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As kernels.topk_logsumexp."""
    k = min(k, logits.shape[1])
    lp = torch.empty(logits.shape[0], k, dtype=torch.float32, device=logits.device)
    ids = torch.empty(logits.shape[0], k, dtype=torch.int64, device=logits.device)
    shape: Fields = {"rows": logits.shape[0], "vocab": logits.shape[1], "stride": logits.stride(0), "k": k}
    fields: Fields = {"logits": logits, "lp": lp, "ids": ids} | shape
    _run("topk", fields, logits.device)
    return lp, ids


def kv_move(kv: torch.Tensor, source: torch.Tensor, target: torch.Tensor, offsets: torch.Tensor) -> None:
    """As kernels.kv_move."""
    (layers, rows, width), groups = kv.shape, offsets.shape[0] - 1
    shape: Fields = {"layers": layers, "layer_rows": rows, "width": width, "groups": groups}
    shape |= {"dtype": _dtype("kv_move", kv)}
    fields: Fields = {"kv": kv, "source": source, "target": target, "offsets": offsets} | shape
    _run("kv_move", fields, kv.device)
