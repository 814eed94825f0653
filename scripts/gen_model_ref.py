"""Write the golden models: small random networks whose greedy text every engine of kdtp must reproduce.

    python scripts/gen_model_ref.py [--out-dir tests/refs] [--seed N]

The files' bytes are a function of the seed on every machine: weights come from the raw bits of PCG64, logits from
`reference`, whose sums and exponentials do not depend on BLAS or CPU. What is left to the C library are the float64
sines, cosines and logarithms of RoPE and YaRN, rounded to float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp.model.weights import kdtr  # noqa: E402
from reference.config import ModelConfig, YarnConfig, to_metadata  # noqa: E402
from reference.generate import generate  # noqa: E402
from reference.model import Model  # noqa: E402
from reference.weights import random_weights  # noqa: E402

LEAST_MARGIN = 1e-2  # between the two largest logits of a step: far above what float32 engines differ by


@dataclass(frozen=True)
class Golden:
    """One file: what is in it, and the seed whose text is neither a loop nor close to a tie."""

    name: str
    config: ModelConfig
    prompt_length: int
    length: int
    seed: int


TINY = Golden(
    "model_tiny",
    ModelConfig(
        vocab_size=512,
        hidden_size=256,
        num_hidden_layers=4,
        first_k_dense_replace=1,
        num_attention_heads=4,
        q_lora_rank=0,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        intermediate_size=256,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        max_position_embeddings=512,
    ),
    prompt_length=8,
    length=24,
    seed=16,
)

V3 = Golden(
    "model_v3",
    ModelConfig(
        vocab_size=509,
        hidden_size=156,
        num_hidden_layers=5,
        first_k_dense_replace=2,
        num_attention_heads=12,
        q_lora_rank=44,
        kv_lora_rank=40,
        qk_nope_head_dim=20,
        qk_rope_head_dim=12,
        v_head_dim=18,
        intermediate_size=204,
        moe_intermediate_size=24,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_shared_experts=2,
        max_position_embeddings=256,
        scoring_func="sigmoid",
        topk_method="noaux_tc",
        n_group=4,
        topk_group=2,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
        rms_norm_eps=1e-5,
        rope_theta=500.0,
        rope_scaling=YarnConfig(factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=1.0),
    ),
    prompt_length=40,
    length=64,
    seed=31,
)


def contents(golden: Golden, seed: int) -> tuple[dict[str, int | float | str | list[int]], dict[str, np.ndarray]]:
    """Metadata and arrays of a golden file."""
    bits = np.random.PCG64(seed)
    weights = random_weights(golden.config, bits)
    prompt = (bits.random_raw(golden.prompt_length) % np.uint64(golden.config.vocab_size)).astype(np.int64)
    out = generate(Model(golden.config, weights), prompt.tolist(), golden.length)
    logits = np.stack(out.logits)
    metadata = {
        "format": "kdtp-model",
        "seed": seed,
        "golden.min_margin": float(margins(logits).min()),
        **to_metadata(golden.config),
    }
    expected = {"golden.prompt": prompt, "golden.tokens": np.array(out.tokens, np.int64), "golden.logits": logits}
    return metadata, weights | expected


def margins(logits: np.ndarray) -> np.ndarray:
    """Largest logit minus the second largest, per row of [T, V]."""
    top = np.sort(logits, axis=-1)
    return top[:, -1] - top[:, -2]


def report(path: Path, golden: Golden, metadata: Mapping[str, object], arrays: Mapping[str, np.ndarray]) -> None:
    """Print what the file holds."""
    print(f"{path}: {path.stat().st_size / 1e6:.2f} MB, seed {metadata['seed']}")
    print(f"  {golden.config}")
    print(f"  prompt  {','.join(map(str, arrays['golden.prompt']))}")
    print(f"  golden  {','.join(map(str, arrays['golden.tokens']))}")
    print(f"  smallest margin between the two best logits: {metadata['golden.min_margin']:.4f}")


def write(golden: Golden, out_dir: Path, seed: int) -> None:
    """Generate one golden file and report it; refuses a seed whose text comes close to a tie."""
    metadata, arrays = contents(golden, seed)
    if (margin := metadata["golden.min_margin"]) < LEAST_MARGIN:
        raise SystemExit(f"{golden.name}: seed {seed} has margin {margin:.4f}, want {LEAST_MARGIN}: try another seed")
    path = out_dir / f"{golden.name}.kdtr"
    kdtr.write(path, metadata, arrays)
    report(path, golden, metadata, arrays)


def main(argv: list[str] | None = None) -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description="Write the golden models.")
    parser.add_argument("--out-dir", type=Path, default=ROOT / "tests" / "refs", help="an existing folder")
    parser.add_argument("--seed", type=int, help="0 or more; without it each model's own seed")
    args = parser.parse_args(argv)
    if not args.out_dir.is_dir():
        parser.error(f"--out-dir {args.out_dir}: not a folder")
    if args.seed is not None and not 0 <= args.seed < 2**63:
        parser.error(f"--seed {args.seed}: must be 0..2^63-1")
    for golden in (TINY, V3):
        write(golden, args.out_dir, golden.seed if args.seed is None else args.seed)


if __name__ == "__main__":
    main()
