"""Write tests/refs/oracle.kdtr: what transformers gives for the tiny checkpoints of tests/hf_cases.py.

    python scripts/gen_oracle.py [--out FILE]

Needs the `oracle` extra. The checkpoints are made anew wherever they are needed; the file holds token ids and logits.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp.model.weights import kdtr  # noqa: E402
from tests import hf_cases, oracle  # noqa: E402

LEAST_MARGIN = 5e-3  # between the two largest logits of a greedy step: above what float32 engines may differ by


def contents(name: str) -> tuple[dict[str, np.ndarray], float]:
    """Arrays of a variant, and the smallest margin of its greedy tokens."""
    model, arrays, least = oracle.load(name), {}, np.inf
    for i, prompt in enumerate(oracle.prompts(name)):
        tokens, logits = oracle.run(model, prompt)
        arrays |= {f"{name}.{i}.prompt": prompt, f"{name}.{i}.tokens": tokens, f"{name}.{i}.logits": logits}
        top = np.sort(logits[len(prompt) - 1 :], -1)
        least = min(least, float((top[:, -1] - top[:, -2]).min()))
    return arrays, least


def main() -> None:
    """Write the file."""
    import transformers

    parser = argparse.ArgumentParser(description="Write the golden logits of transformers.")
    parser.add_argument("--out", type=Path, default=ROOT / "tests" / "refs" / "oracle.kdtr")
    out = parser.parse_args().out
    arrays: dict[str, np.ndarray] = {}
    for name in hf_cases.VARIANTS:
        found, margin = contents(name)
        print(f"{name:<10} smallest margin {margin:.4f}")
        if margin < LEAST_MARGIN:
            raise SystemExit(f"{name}: margin {margin:.5f}, want {LEAST_MARGIN}: try another seed in tests/hf_cases.py")
        arrays |= found
    kdtr.write(out, {"format": "kdtp-oracle", "transformers": transformers.__version__}, arrays)
    print(f"{out}: {out.stat().st_size / 1e3:.0f} kB, transformers {transformers.__version__}")


if __name__ == "__main__":
    main()
