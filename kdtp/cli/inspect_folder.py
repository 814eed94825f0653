"""`kdtp inspect DIR`: what a published model is, what of it is loaded, and what it takes on each rank."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kdtp.cli.tables import printable, table
from kdtp.config import DEVICES, DTYPES, ConfigError
from kdtp.log import amount
from kdtp.model.weights.hf import Checkpoint
from kdtp.model.weights.hf_sizes import legal_tp, weight_bytes
from kdtp.model.weights.table import parameters
from kdtp.types import PAGE_ROWS

_RESERVE = 2e9  # bytes of a GPU that CUDA, its graphs and the kernels' own memory take
_MOST_RANKS = 64  # rows of the table without --tp


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what only folders take."""
    group = parser.add_argument_group("of a folder")
    group.add_argument("--tp", type=int, metavar="N", help="show this number of ranks (default: all that are legal)")
    group.add_argument("--device", choices=DEVICES, help="where it is to run (default cuda)")
    group.add_argument("--dtype", choices=DTYPES, help="of what is not kept in INT4 (default bfloat16)")
    group.add_argument("--gpu-memory", type=float, metavar="GB", help="of one GPU, in 10^9 bytes: does it fit?")


def refuse_flags(chosen: argparse.Namespace) -> None:
    """ConfigError for a flag that says nothing of a file."""
    for name in ("tp", "device", "dtype", "gpu_memory"):
        if getattr(chosen, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')}: goes with a model folder, and {chosen.file} is none")


def run(chosen: argparse.Namespace, path: Path) -> int:
    """Print the folder's report. ConfigError or CheckpointError if it cannot be loaded."""
    memory = chosen.gpu_memory
    if memory is not None and not 0 < memory < 1e6:
        raise ConfigError(f"--gpu-memory = {memory:g}: must be the GB of one GPU, such as 141")
    with Checkpoint(path) as checkpoint:
        found = report(checkpoint, chosen.tp, chosen.device or "cuda", chosen.dtype or "bfloat16", memory)
    print(json.dumps(found, indent=1) if chosen.json else "\n".join(_lines(found)))
    return 0


def report(checkpoint: Checkpoint, tp: int | None, device: str, dtype: str, gpu_memory: float | None) -> dict[str, Any]:
    """All that is said of a checkpoint. gpu_memory: GB of one GPU."""
    model, legal = checkpoint.model, legal_tp(checkpoint, device, dtype)
    if tp is not None and tp not in legal:
        raise ConfigError(f"--tp = {tp}: {checkpoint.path} can be split over {', '.join(map(str, legal))} ranks")
    row = model.num_hidden_layers * model.kv_row
    each = {"float32": 4 * row, "bfloat16": 2 * row}
    sizes = [tp] if tp is not None else [size for size in legal if size <= _MOST_RANKS]
    return {
        "folder": str(checkpoint.path),
        "family": checkpoint.config.family,
        "bytes": checkpoint.nbytes,
        "parameters": sum(math.prod(param.shape) for param in parameters(model).values()),
        "layers": model.num_hidden_layers,
        "dense_layers": model.first_k_dense_replace,
        "vocab_size": model.vocab_size,
        "max_positions": model.max_position_embeddings,
        "stop_tokens": list(model.eos_token_ids),
        "stored_as": dict(sorted(checkpoint.forms.items())),
        "not_loaded": [vars(skipped) for skipped in checkpoint.skipped],
        "legal_tp": legal,
        "kv_bytes_per_token": each,
        "device": device,
        "dtype": dtype,
        "ranks": [_rank(checkpoint, size, device, dtype, each[dtype], gpu_memory) for size in sizes],
    }


def _rank(
    checkpoint: Checkpoint, size: int, device: str, dtype: str, kv: int, gpu_memory: float | None
) -> dict[str, Any]:
    """What the largest part of `size` takes; with the memory of a GPU, whether a page of KV fits too, and how many
    tokens' worth."""
    weights = weight_bytes(checkpoint, 0, size, device, dtype)
    found: dict[str, Any] = {"tp": size, "weight_bytes": weights}
    if gpu_memory is not None:
        free = gpu_memory * 1e9 - _RESERVE - weights
        short = max(0, round(PAGE_ROWS * kv - free))
        found |= {"fits": not short, "short_bytes": short, "kv_tokens": max(0, int(free // kv))}
    return found


def _lines(found: dict[str, Any]) -> Iterable[str]:
    yield f"{printable(found['folder'])}: {found['family']}, {amount(found['bytes'])}"
    kv, stored = found["kv_bytes_per_token"], found["stored_as"]
    skipped = [f"{s['what']} ({s['tensors']} tensors, {amount(s['nbytes'])})" for s in found["not_loaded"]]
    rows = [
        ("parameters", f"{found['parameters']:,}"),
        ("layers", f"{found['layers']}, the first {found['dense_layers']} dense"),
        ("vocabulary", f"{found['vocab_size']} tokens; stop: {' '.join(map(str, found['stop_tokens'])) or 'none'}"),
        ("context", f"{found['max_positions']} tokens"),
        ("stored as", ", ".join(f"{form} {amount(nbytes)}" for form, nbytes in stored.items())),
        ("not loaded", ", ".join(skipped) or "nothing"),
        ("legal --tp", " ".join(map(str, found["legal_tp"]))),
        ("KV per token", f"{kv['float32']} bytes in float32, {kv['bfloat16']} in bfloat16, on every rank"),
    ]
    yield from table("model", rows, "<<")
    fits = "fits" in found["ranks"][0]
    heads = [("tp", "weights", *(("room for KV",) if fits else ()))]
    title = f"each rank, in {found['dtype']} on {found['device']}"
    yield from table(title, heads + [_row(rank) for rank in found["ranks"]], ">><" if fits else ">>")


def _row(rank: dict[str, Any]) -> tuple[str, ...]:
    row = (str(rank["tp"]), amount(rank["weight_bytes"]))
    if "fits" not in rank:
        return row
    short = f"does not fit: {amount(rank['short_bytes'])} short"
    return (*row, f"{rank['kv_tokens']:,} tokens" if rank["fits"] else short)
