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

Shape = tuple[int, ...]


def layer_shapes(c: ModelConfig, i: int) -> dict[str, Shape]:
    """Parameters of layer i, by name."""
    heads, qk = c.num_attention_heads, c.qk_nope_head_dim + c.qk_rope_head_dim
    shapes: dict[str, Shape] = {"attn_norm": (c.hidden_size,), "mlp_norm": (c.hidden_size,)}
    if c.q_lora_rank == 0:
        shapes["w_q"] = (c.hidden_size, heads * qk)
    else:
        shapes |= {"w_q_a": (c.hidden_size, c.q_lora_rank), "q_a_norm": (c.q_lora_rank,)}
        shapes["w_q_b"] = (c.q_lora_rank, heads * qk)
    shapes |= {"w_kv_a": (c.hidden_size, c.kv_row), "kv_a_norm": (c.kv_lora_rank,)}
    shapes |= {"w_kc": (heads, c.qk_nope_head_dim, c.kv_lora_rank), "w_vc": (heads, c.kv_lora_rank, c.v_head_dim)}
    shapes["w_o"] = (heads * c.v_head_dim, c.hidden_size)
    return shapes | (mlp_shapes(c, (), c.intermediate_size, "") if i < c.first_k_dense_replace else moe_shapes(c))


def mlp_shapes(c: ModelConfig, stack: Shape, width: int, prefix: str) -> dict[str, Shape]:
    """A SwiGLU MLP of inner width `width`, or a stack of them."""
    wide, narrow = (*stack, c.hidden_size, width), (*stack, width, c.hidden_size)
    return {f"{prefix}w_gate": wide, f"{prefix}w_up": wide, f"{prefix}w_down": narrow}


def moe_shapes(c: ModelConfig) -> dict[str, Shape]:
    """Router, experts and shared expert."""
    shapes: dict[str, Shape] = {"router": (c.hidden_size, c.n_routed_experts)}
    if c.topk_method == "noaux_tc":
        shapes["router_bias"] = (c.n_routed_experts,)
    shapes |= mlp_shapes(c, (c.n_routed_experts,), c.moe_intermediate_size, "experts.")
    if c.n_shared_experts:
        shapes |= mlp_shapes(c, (), c.moe_intermediate_size * c.n_shared_experts, "shared.")
    return shapes


def shapes(c: ModelConfig) -> dict[str, Shape]:
    """Every parameter of the model, in the file's order."""
    table: dict[str, Shape] = {"embed": (c.vocab_size, c.hidden_size)}
    for i in range(c.num_hidden_layers):
        table |= {f"layers.{i}.{name}": shape for name, shape in layer_shapes(c, i).items()}
    return table | {"final_norm": (c.hidden_size,), "head": (c.hidden_size, c.vocab_size)}


# Standard deviation of an output over that of its input. Above 1 where a sharp choice is wanted: attention that picks
# out few tokens, experts far apart, a clear best token. Much larger ones make chaos: rounding alone flips experts.
GAINS = {"w_q": 1.5, "w_q_b": 1.5, "w_o": 1.5, "router": 2.0, "head": 2.0}


def draw(bits: np.random.PCG64, name: str, shape: Shape) -> np.ndarray:
    """One parameter, uniform: norms 0.7..1.3, the routing bias +-0.1, matrices by their fan-in and gain."""
    # 24 random bits are exact in float32, and random_raw is the part of numpy's random that never changes.
    size = int(np.prod(shape))
    uniform = ((bits.random_raw(size) >> np.uint64(40)).astype(np.float32) * np.float32(2**-23) - 1).reshape(shape)
    kind = name.rsplit(".", 1)[-1]
    if kind.endswith("norm"):
        return 1 + np.float32(0.3) * uniform
    if kind == "router_bias":
        return np.float32(0.1) * uniform
    fan_in = {"embed": 1, "w_kc": shape[-1]}.get(kind, shape[-2] if len(shape) > 1 else 1)
    return np.float32(GAINS.get(kind, 1.0) * (3 / fan_in) ** 0.5) * uniform


def contents(golden: Golden, seed: int) -> tuple[dict[str, int | float | str | list[int]], dict[str, np.ndarray]]:
    """Metadata and arrays of a golden file."""
    bits = np.random.PCG64(seed)
    weights = {name: draw(bits, name, shape) for name, shape in shapes(golden.config).items()}
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
