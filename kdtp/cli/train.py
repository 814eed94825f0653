"""`kdtp train target` and `kdtp train drafter`: a small pair of networks from Python's own source text."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from kdtp import pair
from kdtp.config import DEVICES, ConfigError

EXIT_INTERRUPTED = 130
# Flags that change the recipe's training.
_CHANGES = {
    "batch": (int, "sequences per step"),
    "seq": (int, "tokens of a sequence"),
    "epochs": (float, "end after so many times the text, unless --steps says otherwise"),
    "learning_rate": (float, "the highest one"),
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="target|drafter")
    target = kinds.add_parser("target", help="a small MLA + MoE model in the published layout, with experts in INT4")
    target.add_argument(
        "--dropout", type=float, help="of the embedding and of what a layer adds (default: by the recipe)"
    )
    _add(target)
    drafter = kinds.add_parser("drafter", help="a DFlash drafter for such a target")
    drafter.add_argument("--target", required=True, metavar="DIR", help="the target's folder, or pair: the shipped one")
    drafter.add_argument("--version", type=int, choices=(1, 2), default=2, help="of DFlash (default 2)")
    drafter.add_argument("--samples", type=int, metavar="N", help="texts that the target writes to learn from")
    _add(drafter)


def _add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="goes on with the run there, if any")
    parser.add_argument("--recipe", type=Path, metavar="FILE", help="default: that of the shipped pair")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="*.py below it (default: the standard library)")
    parser.add_argument("--device", choices=DEVICES, default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="of the whole run (default: by --epochs)")
    parser.add_argument("--minutes", type=float, default=0.0, metavar="M", help="end in time (default: no limit)")
    parser.add_argument("--checkpoint-every", type=int, default=500, metavar="N", help="steps (default 500)")
    parser.add_argument("--evaluate-every", type=int, default=250, metavar="N", help="steps (default 250)")
    for name, (kind, text) in _CHANGES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, help=f"{text} (default: by the recipe)")


def run(chosen: argparse.Namespace) -> int:
    """Train, and write a folder as published."""
    try:
        import matplotlib  # noqa: F401 - of the extra, missed before hours of training rather than after
    except ImportError:
        raise ConfigError("matplotlib is missing: pip install 'kdtp[train]'") from None
    from kdtp.train import run as training
    from kdtp.train.loop import Interrupted
    from kdtp.train.state import CHECKPOINT

    for name in ("checkpoint_every", "evaluate_every"):
        _want(getattr(chosen, name) >= 1, name, getattr(chosen, name), "at least 1")
    _want(chosen.steps >= 0, "steps", chosen.steps, "at least 0")
    _want(0 <= chosen.minutes < 1e6, "minutes", chosen.minutes, "at least 0")
    _want(0 <= chosen.seed < 1 << 31, "seed", chosen.seed, f"0..{(1 << 31) - 1}")
    is_target = chosen.kind == "target"
    names = (*_CHANGES, "dropout" if is_target else "samples")
    changes: dict[str, Any] = {name: value for name in names if (value := getattr(chosen, name)) is not None}
    default = "target.json" if is_target else f"drafter-v{chosen.version}.json"
    options = training.Options(
        out=chosen.out,
        recipe=chosen.recipe or training.RECIPES / default,
        corpus=chosen.corpus,
        device=chosen.device,
        seed=chosen.seed,
        steps=chosen.steps,
        minutes=chosen.minutes,
        checkpoint=chosen.checkpoint_every,
        evaluate=chosen.evaluate_every,
        changes=changes,
        command=_command(chosen),
    )
    try:
        training.target(options) if is_target else training.drafter(options, pair.target(chosen.target))
    except OSError as error:
        problem = f"{error.filename or chosen.out}: {(error.strerror or str(error)).lower()}"
        begun = os.path.isfile(options.training / CHECKPOINT)
        raise ConfigError(problem + ("; the same command goes on from the checkpoint" if begun else "")) from None
    except Interrupted as stopped:
        print(f"kdtp train: {stopped}", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0


def _command(chosen: argparse.Namespace) -> tuple[str, ...]:
    """What does the same, nothing left to a default that may change."""
    flags = {name: value for name, value in vars(chosen).items() if name not in ("command", "kind", "run")}
    given = [(f"--{name.replace('_', '-')}", str(value)) for name, value in flags.items() if value is not None]
    return "kdtp", "train", chosen.kind, *(word for pair in given for word in pair)


def _want(ok: bool, name: str, value: object, legal: str) -> None:
    if not ok:
        raise ConfigError(f"--{name.replace('_', '-')} = {value}: must be {legal}")
