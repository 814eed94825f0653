"""Find where the engine and the reference part: the same prompt through both, compared stage by stage.

    python scripts/diff_layers.py MODEL.kdtr [--reference OTHER.kdtr] [--prompt ID ...] [--stop-after 12.moe]
        [--device cpu|cuda] [--dtype float32|bfloat16] [--tolerance T]

Stages, in order: embed; of layer 12: 12.attn_norm, 12.kv (rows written to the cache), 12.queries (absorbed, rotated),
12.heads (behind w_vc), 12.attn (behind w_o), 12.mlp_norm, then 12.mlp, or 12.router (logits), 12.experts (each token's
weights over all experts), 12.moe; head (logits). A line has the largest difference, where it is, its ratio to the
reference's root mean square, and the cosine of the whole. The first ratio above --tolerance is where they part: exit
status 1. One rank; no CUDA graphs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp.config import DEVICES, DTYPES  # noqa: E402
from kdtp.model.weights import kdtr  # noqa: E402
from kdtp.model.weights.kdtr_model import KdtrModel  # noqa: E402
from reference.config import from_metadata  # noqa: E402
from scripts.gpu_time import missing  # noqa: E402
from scripts.layer_stages import run_engine, run_reference, stages  # noqa: E402
from scripts.measure import table  # noqa: E402

TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}  # of a stage's root mean square


class Stopped(Exception):
    """The last stage that is wanted has been reached."""


@dataclass(frozen=True)
class Line:
    """A stage, compared. ratio: largest difference over the reference's root mean square, NaN if there is any."""

    stage: str
    shape: tuple[int, ...]
    largest: float
    at: tuple[int, ...]
    ratio: float
    cosine: float


def compare(stage: str, found: np.ndarray, want: np.ndarray) -> Line:
    """Of two arrays of one shape."""
    assert found.shape == want.shape, (stage, found.shape, want.shape)
    a, b = (x.astype(np.float64) for x in (found, want))
    gap = np.abs(a - b)
    at = np.unravel_index(int(np.argmax(np.where(np.isnan(gap), np.inf, gap))), gap.shape)
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    size = float(np.sqrt(np.mean(b * b)))
    largest = float(gap[at])
    ratio = largest / size if size else (0.0 if largest == 0 else np.inf)
    return Line(stage, found.shape, largest, tuple(map(int, at)), ratio, float(np.sum(a * b)) / norms if norms else 1.0)


@dataclass
class Diff:
    """Both runs: the reference's stages first, then the engine's as they come. last: the stage behind which it ends."""

    last: str
    want: dict[str, np.ndarray] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)

    def reference(self, stage: str, values: np.ndarray) -> None:
        """A stage of the reference."""
        self.want[stage] = values.copy()
        self._end(stage)

    def engine(self, stage: str, values: np.ndarray) -> None:
        """A stage of the engine."""
        self.lines.append(compare(stage, values, self.want[stage]))
        self._end(stage)

    def _end(self, stage: str) -> None:
        if stage == self.last:
            raise Stopped


def parting(lines: Sequence[Line], tolerance: float) -> Line | None:
    """The first stage whose ratio is above it, or NaN."""
    return next((line for line in lines if not line.ratio <= tolerance), None)


def diff(
    engine: Path, reference: Path, prompt: Sequence[int], last: str, dtype: str, device: torch.device
) -> list[Line]:
    """Every stage up to `last`, with the engine's weights from one file and the reference's from another."""
    both = Diff(last)
    for run in (
        lambda: run_reference(reference, prompt, both.reference),
        lambda: run_engine(engine, prompt, dtype, device, both.engine),
    ):
        with suppress(Stopped):
            run()
    return both.lines


def show(lines: Sequence[Line], tolerance: float) -> str:
    """A line per stage, and where they part."""
    rows = [
        [
            line.stage,
            "x".join(map(str, line.shape)),
            f"{line.largest:.3g}",
            ",".join(map(str, line.at)),
            f"{line.ratio:.2e}",
            f"{line.cosine:.9f}",
        ]
        for line in lines
    ]
    first = parting(lines, tolerance)
    end = f"no ratio above {tolerance:g}" if first is None else f"they part at {first.stage}: ratio {first.ratio:.2e}"
    return f"{table(('stage', 'shape', 'largest', 'at', 'ratio', 'cosine'), rows)}\n{end}"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line, checked against the model: prompt and stop_after are what will be run."""
    parser = argparse.ArgumentParser(description="Find where the engine and the reference part.")
    parser.add_argument("model", type=Path, help="a KDTR model file")
    parser.add_argument("--reference", type=Path, help="the reference's weights are in another file of that model")
    parser.add_argument("--prompt", type=int, nargs="+", help="token ids; otherwise the file's golden prompt")
    parser.add_argument("--stop-after", default="head", metavar="STAGE", help="for instance 12.moe")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the engine")
    parser.add_argument("--tolerance", type=float, help="1e-3 with float32, 0.25 with bfloat16")
    chosen = parser.parse_args(arguments)
    chosen.reference = chosen.reference or chosen.model
    if chosen.tolerance is None:
        chosen.tolerance = TOLERANCE[chosen.dtype]
    try:
        _check(chosen)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    return chosen


def _check(chosen: argparse.Namespace) -> None:
    with KdtrModel(chosen.model), KdtrModel(chosen.reference):
        pass  # sound, and models: the reference would not notice
    with kdtr.Reader(chosen.model) as reader, kdtr.Reader(chosen.reference) as other:
        config = from_metadata(reader.metadata)
        if from_metadata(other.metadata) != config:
            raise ValueError(f"--reference {chosen.reference}: another model than {chosen.model}")
        if chosen.prompt is None:
            if "golden.prompt" not in reader.entries:
                raise ValueError(f"{chosen.model} has no golden prompt: give --prompt")
            chosen.prompt = reader.array("golden.prompt").tolist()
    legal = stages(config)
    if chosen.stop_after not in legal:
        raise ValueError(f"--stop-after {chosen.stop_after}: must be one of {', '.join(legal)}")
    wrong = [token for token in chosen.prompt if not 0 <= token < config.vocab_size]
    if wrong:
        raise ValueError(f"--prompt {wrong[0]}: must be in [0, {config.vocab_size})")
    if len(chosen.prompt) > config.max_position_embeddings:
        raise ValueError(f"--prompt: {len(chosen.prompt)} tokens of at most {config.max_position_embeddings}")
    if not chosen.tolerance >= 0:
        raise ValueError(f"--tolerance {chosen.tolerance}: must be at least 0")


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; 1 if they part."""
    chosen = parse(arguments)
    if chosen.device == "cuda" and (lack := missing()):
        sys.exit(f"diff_layers: {lack}")
    device = torch.device(chosen.device)
    lines = diff(chosen.model, chosen.reference, chosen.prompt, chosen.stop_after, chosen.dtype, device)
    print(show(lines, chosen.tolerance))
    return 0 if parting(lines, chosen.tolerance) is None else 1


if __name__ == "__main__":
    sys.exit(main())
