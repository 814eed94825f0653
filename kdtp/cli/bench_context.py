"""`kdtp bench context`: throughput, acceptance and stage times over the length of the context."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtp.cli.flags import add_engine_flags, engine_config

if TYPE_CHECKING:
    from kdtp.engine.plan import Plan

EXIT_ENGINE = 70


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes, beside what both benchmarks do."""
    parser.add_argument(
        "--lengths", type=_lengths, metavar="N,N,…", help="of the contexts (default: doubled from 64 to the most)"
    )
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="behind each context (default 64)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="what the contexts hold (default: random ids)")
    add_engine_flags(parser)


def _lengths(text: str) -> list[int]:
    if not re.fullmatch(r"\d{1,7}(,\d{1,7})*", text) or min(map(int, text.split(","))) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: must be counts, such as 128,1024,8192")
    return [int(part) for part in text.split(",")]


def run(chosen: argparse.Namespace) -> int:
    """Measure one length after another; 70 if the engine dies."""
    from kdtp.bench import context
    from kdtp.engine.api import Engine
    from kdtp.engine.plan import plan
    from kdtp.engine.rpc import EngineDead
    from kdtp.types import SamplingParams

    # A shorter context's pages would spare the next one its prefill.
    checked = plan(replace(engine_config(chosen), prefix_cache=False))
    asked = context.prompts(_fitting(chosen, checked), checked.model.vocab_size, _ids(chosen, checked), chosen.seed)
    params = SamplingParams(max_tokens=chosen.max_tokens, ignore_eos=True)
    speculate = not chosen.no_speculate
    try:
        with Engine.of(checked.config) as engine:
            print(f"{'context':>8}{'prefill/s':>11}{'tokens/s':>10}{'per round':>11}  ms per round", file=sys.stderr)
            points = context.measure(engine, asked, params, speculate, lambda point: _show_point(point.figures()))
    except EngineDead as error:
        print(f"kdtp bench: {error}", file=sys.stderr)
        return EXIT_ENGINE
    figures = [point.figures() for point in points]
    name = Path(checked.config.model).stem
    if chosen.json:
        print(json.dumps({"model": name, "points": figures}))
    if chosen.png is not None:
        from kdtp.bench.plot import context_picture

        title = f"{name}: drafter {checked.config.drafter.name}, tp {checked.config.tp}"
        context_picture(chosen.png, title, figures)
    return 0


def _fitting(chosen: argparse.Namespace, checked: Plan) -> Sequence[int]:
    most = min(checked.model.max_position_embeddings, checked.config.kv_tokens - checked.config.drafter.budget - 1)
    room = most - chosen.max_tokens
    if chosen.max_tokens < 2 or room < 1:
        raise ValueError(f"--max-tokens {chosen.max_tokens}: must be 2..{most - 1}")
    lengths: list[int] = chosen.lengths or [64 << i for i in range(24) if 64 << i < room] + [room]
    long = next((length for length in lengths if length > room), None)
    if long is not None:
        raise ValueError(f"--lengths {long}: with {chosen.max_tokens} tokens behind it must be at most {most}")
    return lengths


def _ids(chosen: argparse.Namespace, checked: Plan) -> Sequence[int]:
    """The tokens of --text."""
    if chosen.text is None:
        return ()
    from kdtp.cli.answer import find_tokenizer

    tokenizer = find_tokenizer(checked.config, checked.model.vocab_size, needed=True)
    assert tokenizer is not None
    try:
        ids = tokenizer.encode(chosen.text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--text {chosen.text}: {error}") from None
    if not ids:
        raise ValueError(f"--text {chosen.text}: is empty")
    return ids


def _show_point(point: Mapping[str, Any]) -> None:
    stages = ", ".join(f"{stage} {ms:.2f}" for stage, ms in point["round_ms"].items())
    print(
        f"{point['context']:>8}{point['prefill_tokens_per_second']:>11.1f}{point['tokens_per_second']:>10.1f}"
        f"{point['tokens_per_round']:>11.2f}  {stages}",
        file=sys.stderr,
        flush=True,
    )
