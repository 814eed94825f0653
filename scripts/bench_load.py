"""How fast a published checkpoint loads, and how much memory that takes on each rank.

    python scripts/bench_load.py [--folder DIR] [--gb N] [--format bf16|int4|fp8] [--tp 1 2 4] [--device cpu|cuda|meta]

Writes a synthetic checkpoint of about N GB (kept if --folder is given), then loads it as the ranks of an engine do, one
process for each, all at once; on the device "meta" nothing is kept, so that reading alone is measured. Prints for each
number of ranks the time and the processor time of the slowest, the rate over all of them, the bytes that a rank read,
what its weights take in host memory, the most memory that it had (VmHWM), what of that is neither weights nor was there
before, and how much of it were mapped pages of the files. --cold asks the kernel to forget the files first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp.model.weights import safetensors  # noqa: E402
from kdtp.model.weights.hf_config import parse  # noqa: E402
from kdtp.model.weights.hf_table import origins  # noqa: E402

GROUP, BLOCK = 32, 128
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
        }
    },
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "int4": {"quantization_config": INT4},
    "fp8": {"quantization_config": FP8},
}


def config(layers: int, form: str, width: int) -> dict[str, Any]:
    """Kimi K2's layers of another width and with fewer experts: many tensors of a few MB, at a width of 4096."""
    return {
        "model_type": "kimi_k2",
        "vocab_size": 32768,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 1,
        "num_attention_heads": width // 128,
        "q_lora_rank": 3 * width // 8,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "intermediate_size": 2 * width,
        "moe_intermediate_size": width // 4,
        "n_routed_experts": 64,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "max_position_embeddings": 4096,
        **FORMATS[form],
    }


def tensors(settings: dict[str, Any], form: str) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Name, dtype and shape of every tensor."""
    seen = set()
    for group in origins(parse(settings, "bench").model, False).values():
        for origin in group:
            if origin.tensor in seen:
                continue
            seen.add(origin.tensor)
            name, shape = origin.tensor, origin.shape
            if form == "int4" and ".experts." in name:
                yield f"{name}_packed", "I32", (shape[0], shape[1] // 8)
                yield f"{name}_scale", "BF16", (shape[0], shape[1] // GROUP)
                yield f"{name}_shape", "I32", (2,)
            elif form == "fp8" and origin.linear:
                yield name, "F8_E4M3", shape
                yield f"{name}_scale_inv", "F32", (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
            else:
                yield name, "F32" if name.endswith("bias") else "BF16", shape


def write(folder: Path, form: str, gb: float, width: int = 4096) -> int:
    """A checkpoint of about `gb` GB in shards of one layer's tensors; bytes written."""
    layers = 2
    while sum(nbytes(t) for t in tensors(config(layers, form, width), form)) < gb * 1e9:
        layers += 1
    settings = config(layers, form, width)
    noise = np.random.default_rng(0).integers(0, 2**16, 1 << 22, np.uint16)
    noise = np.where(noise >> 7 & 0xFF >= 0x7F, 0x3C00 | noise & 0x7F, noise).astype(np.uint16)  # bfloat16 below 1
    (folder / "config.json").write_text(json.dumps(settings))
    shards: dict[str, dict[str, tuple[str, np.ndarray]]] = {}
    for name, dtype, shape in tensors(settings, form):
        layer = name.split(".")[2] if name.startswith("model.layers.") else "0"
        shards.setdefault(f"model-{layer}.safetensors", {})[name] = dtype, fill(name, dtype, shape, noise, width)
        if len(shards) > 1 and layer != "0":
            flush(folder, shards, keep=f"model-{layer}.safetensors")
    flush(folder, shards)
    written = {file.name: list(safetensors.File(file).tensors) for file in sorted(folder.glob("*.safetensors"))}
    weight_map = {name: file for file, names in written.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def flush(folder: Path, shards: dict[str, dict[str, tuple[str, np.ndarray]]], keep: str = "") -> None:
    """Write the shards that are complete; that of layer 0 is last, since the head belongs to it."""
    for file in [file for file in shards if file != keep and (file != "model-0.safetensors" or not keep)]:
        safetensors.write(folder / file, shards.pop(file))


def nbytes(tensor: tuple[str, str, tuple[int, ...]]) -> int:
    """Bytes of a tensor."""
    return int(np.prod(tensor[2])) * np.dtype(safetensors.LAYOUT[tensor[1]]).itemsize


def fill(name: str, dtype: str, shape: tuple[int, ...], noise: np.ndarray, width: int) -> np.ndarray:
    """Values that load: noise, but a shape where one is told, and finite scales."""
    kind = safetensors.LAYOUT[dtype]
    if name.endswith("_shape"):
        wide = (width // 4, width)
        return np.array(wide[::-1] if "down_proj" in name else wide, np.int32)
    if dtype == "F32":
        return np.full(shape, 0.01, np.float32)
    size = int(np.prod(shape)) * np.dtype(kind).itemsize // 2
    part = noise[:size] if size <= noise.size else np.resize(noise, size)  # which copies all of it for a small one, too
    return part.view(kind).reshape(shape)


RANK = """
import json, sys, time, threading
import torch
from kdtp.model.weights.load import Weights, open_model
from kdtp.model.weights.table import parameters
torch.set_num_threads(1)

def status():
    lines = open("/proc/self/status").read().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmHWM", "RssFile"))}

def watch(most, done):
    while not done.wait(0.005):
        most[0] = max(most[0], status()["RssFile"])

path, rank, size, dtype, kind = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], sys.argv[5]
device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
torch.empty(1, device=device)
before = status()
most, done = [0], threading.Event()
threading.Thread(target=watch, args=(most, done)).start()
began, began_cpu = time.monotonic(), time.process_time()
with open_model(path) as source:
    weights = Weights(source, rank, size, dtype, lambda done, total: None, device)
    read, held = source.nbytes(rank, size), []
    for name, param in parameters(source.config).items():
        if weights.keeps_int4(name):
            held += weights.int4(name)
        else:
            held.append(weights.take(name) if name == "embed" or len(param.shape) < 2 else weights.matrix(name))
    seconds, busy = time.monotonic() - began, time.process_time() - began_cpu
done.set()
kept = sum(tensor.nbytes for tensor in held) if kind == "cpu" else 0
print(json.dumps({"seconds": seconds, "busy": busy, "read": read, "kept": kept, "before": before["VmHWM"],
                  "peak": status()["VmHWM"], "files": most[0] - before["RssFile"]}))
"""


def load(folder: Path, size: int, dtype: str, device: str) -> list[dict[str, float]]:
    """Load with `size` processes at once; what each says."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = partial(subprocess.Popen, stdout=subprocess.PIPE, env=environment, text=True)
    command = [sys.executable, "-c", RANK, str(folder)]
    ranks = [start([*command, str(rank), str(size), dtype, device]) for rank in range(size)]
    said = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("a rank failed")
    return [json.loads(text) for text in said]


def forget(folder: Path) -> None:
    """Take the files out of the page cache."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def show(folder: Path, sizes: list[int], dtype: str, device: str, cold: bool) -> None:
    """Load with each number of ranks and print a line of it."""
    print(" tp      s  cpu s   GB/s | GB, most of a rank: read, kept, peak, peak - before - kept, files")
    for size in sizes:
        if cold:
            forget(folder)
        ranks = load(folder, size, dtype, device)
        seconds, busy = (max(rank[key] for rank in ranks) for key in ("seconds", "busy"))
        rate = sum(rank["read"] for rank in ranks) / seconds / 1e9
        most = max(ranks, key=lambda rank: rank["peak"])
        extra = most["peak"] - most["before"] - most["kept"]
        figures = (most["read"], most["kept"], most["peak"], extra, most["files"])
        shown = "  ".join(f"{value / 1e9:.3f}" for value in figures)
        print(f"{size:>3} {seconds:>6.1f} {busy:>6.1f} {rate:>6.2f} | {shown}", flush=True)


def main() -> None:
    """Write, load, print."""
    parser = argparse.ArgumentParser(description="Load rate and memory of a synthetic checkpoint.")
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here, or use the one that is here")
    parser.add_argument("--gb", type=float, default=4.0)
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda", "meta"))
    parser.add_argument("--cold", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-load-") as temporary:
        folder = chosen.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "config.json").exists():
            began = time.monotonic()
            size = write(folder, chosen.format, chosen.gb)
            print(f"wrote {size / 1e9:.2f} GB, {chosen.format}, in {time.monotonic() - began:.0f} s")
        show(folder, chosen.tp, chosen.dtype, chosen.device, chosen.cold)


if __name__ == "__main__":
    main()
