"""`kdtp bench accept`: tokens per round and speed of AR, chains and trees on held-out text, all compared with AR."""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtp import pair
from kdtp.cli.flags import add_some_flags, engine_config
from kdtp.config import DRAFTERS, ConfigError, DrafterConfig

if TYPE_CHECKING:
    from kdtp.bench.accept import Bench, Way
    from kdtp.engine.plan import Plan
    from kdtp.text.template import ChatTemplate
    from kdtp.text.tokenizer import Tokenizer

EXIT_PARTED = 1  # a text was another one than plain decoding's
EXIT_INPUT = 2
EXIT_ENGINE = 70
EXIT_INTERRUPTED = 130
_RANKS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 64))  # columns of the table: from, to


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes, beside what all benchmarks do."""
    parser.add_argument(
        "--drafter",
        action="append",
        type=_drafter,
        metavar="NAME[=DIR]",
        help="ngram, dflash=DIR or dflash+ngram=DIR, DIR as published or pair; may be given several times"
        " (default: ngram, and with the model that ships also dflash=pair and dflash+ngram=pair)",
    )
    parser.add_argument(
        "--budgets",
        type=_budgets,
        default=[4, 8, 16, 32, 64, 128, 256],
        metavar="N,N,…",
        help="nodes of the trees (default 4,8,16,32,64,128,256)",
    )
    parser.add_argument(
        "--temperatures", type=_temperatures, default=[0.0, 1.0], metavar="T,T,…", help="default 0,1; 0 is greedy"
    )
    parser.add_argument("--prompts", type=int, default=4, metavar="N", help="pieces of held-out files (default 4)")
    parser.add_argument("--prompt-tokens", type=int, default=192, metavar="N", help="default 192")
    parser.add_argument("--max-tokens", type=int, default=64, metavar="N", help="behind each prompt (default 64)")
    parser.add_argument(
        "--corpus", type=Path, metavar="DIR", help="*.py files (default: this Python's standard library)"
    )
    parser.add_argument(
        "--chat", action="store_true", help="ask for an answer to each piece, by the model's chat template"
    )
    add_some_flags(parser, ("model", "tokenizer", "tp", "device", "dtype", "threads"), ("block", "topk"))
    parser.set_defaults(**{"engine.model": pair.NAME})


def _drafter(text: str) -> tuple[str, DrafterConfig]:
    name, _, folder = text.partition("=")
    names = [name for name in DRAFTERS if name not in ("none", "oracle")]
    if name not in names:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: must be one of {', '.join(names)}, a network with =DIR")
    try:
        return text, DrafterConfig(name, model=folder)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r}: {error}") from None


def _budgets(text: str) -> list[int]:
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text) or not all(1 <= int(part) <= 1024 for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: must be counts of 1..1024, such as 4,16,64")
    return sorted({int(part) for part in text.split(",")})


def _temperatures(text: str) -> list[float]:
    number = r"\d{1,3}(\.\d{1,6})?"
    if not re.fullmatch(f"{number}(,{number})*", text):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: must be temperatures, such as 0,0.8,1")
    return sorted({float(part) for part in text.split(",")})


def run(chosen: argparse.Namespace) -> int:
    """Measure one way after another; 1 if a text is not plain decoding's.

    What was measured before an unsound drafter (2), the engine's death (70) or an interruption (130) is shown.
    """
    from kdtp.bench import accept
    from kdtp.engine.plan import plan

    checked = plan(engine_config(chosen, with_drafter=False))
    drafters = dict(chosen.drafter or _usual(chosen))
    block = _block(chosen, checked, drafters)
    bench, names = _bench(chosen, checked)
    ways = accept.ways(drafters, chosen.budgets, block)
    print(f"{len(bench.prompts)} prompts, from {', '.join(names)}", file=sys.stderr)
    found: list[dict[str, Any]] = []
    code, whole = _measure(bench, ways, names, found), len(ways) * len(bench.temperatures)
    if code:
        print(f"{len(found)} of {whole} rows were measured", file=sys.stderr)
        if not found:
            return code
    name, tp = Path(getattr(chosen, "engine.model")).name, checked.config.tp
    kind = "chat prompts" if chosen.chat else "prompts"
    title = f"{name}, tp {tp}: {len(names)} {kind} of {chosen.prompt_tokens} tokens, {chosen.max_tokens} behind each"
    if code:
        title += f"; PARTIAL, {len(found)} of {whole} rows"
    if chosen.json:
        about = {"model": name, "tp": tp, "chat": chosen.chat, "block": block, "files": names, "complete": not code}
        print(json.dumps(about | {"points": found}))
    else:
        _show(title, found)
    if chosen.png is not None:
        from kdtp.bench.plot import accept_picture

        accept_picture(chosen.png, title, found)
    return code or (0 if all(point["equal_to_plain"] == point["prompts"] for point in found) else EXIT_PARTED)


def _measure(bench: Bench, ways: Sequence[Way], names: Sequence[str], found: list[dict[str, Any]]) -> int:
    """Append the figures of each way to `found`, as they come; the exit code of what ended it early, or 0."""
    from kdtp.engine.rpc import EngineDead

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        with contextlib.closing(bench.run(ways, lambda way: _tell(way, ways))) as points:
            for point in points:
                found.append(point.figures())
                for i in point.parted:
                    print(f"NOT EQUAL: {_named(found[-1])}, prompt {i} ({names[i]})", file=sys.stderr)
    except (EngineDead, ValueError) as error:  # of a drafter's weights, say, which nobody has read before
        print(f"kdtp bench: {error}", file=sys.stderr)
        return EXIT_ENGINE if isinstance(error, EngineDead) else EXIT_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _usual(chosen: argparse.Namespace) -> list[tuple[str, DrafterConfig]]:
    ours = getattr(chosen, "engine.model") == pair.NAME
    return [_drafter(text) for text in ("ngram", *(("dflash=pair", "dflash+ngram=pair") if ours else ()))]


def _block(chosen: argparse.Namespace, checked: Plan, drafters: Mapping[str, DrafterConfig]) -> int:
    """The same for all, so that they can be compared. Errors of a drafter that does not fit come here."""
    from dataclasses import replace

    from kdtp.engine.plan import plan

    block: int = checked.config.drafter.block
    for config in drafters.values():
        wanted = replace(config, block=block, topk=checked.config.drafter.topk)
        block = plan(replace(checked.config, drafter=wanted)).config.drafter.block
    if block < 2:
        raise ValueError(f"--block {block}: must be at least 2, to draft something")
    return block


def _bench(chosen: argparse.Namespace, checked: Plan) -> tuple[Bench, list[str]]:
    from kdtp.bench import accept
    from kdtp.cli.answer import find_tokenizer
    from kdtp.train import corpus

    room = checked.model.max_position_embeddings
    for flag, value, least, most in (
        ("prompts", chosen.prompts, 1, 1000),
        ("prompt-tokens", chosen.prompt_tokens, 2, room - 2),
        ("max-tokens", chosen.max_tokens, 2, room - chosen.prompt_tokens),
    ):
        if not least <= value <= most:
            raise ValueError(f"--{flag} {value}: must be {least}..{most}")
    tokenizer = find_tokenizer(checked.config, checked.model.vocab_size, needed=True)
    assert tokenizer is not None
    template = _template(tokenizer) if chosen.chat else None
    held_out = corpus.read(chosen.corpus).held_out
    asked = accept.prompts(held_out, tokenizer, chosen.prompts, chosen.prompt_tokens, chosen.seed)
    ids = [prompt for _, prompt in asked]
    if template:
        ids = [_asked(tokenizer, template, prompt) for prompt in ids]
        longest = max(map(len, ids))
        if longest + chosen.max_tokens > room:
            raise ValueError(
                f"--prompt-tokens {chosen.prompt_tokens}: the chat template makes up to {longest} of it; with"
                f" --max-tokens {chosen.max_tokens} must be at most {room}"
            )
    bench = accept.Bench(checked.config, ids, chosen.temperatures, chosen.max_tokens, chosen.seed)
    return bench, [name for name, _ in asked]


def _template(tokenizer: Tokenizer) -> ChatTemplate:
    from kdtp.text import template

    found = template.load(tokenizer)
    if found is None:
        raise ValueError(
            f"--chat: {tokenizer.folder} has no chat template; must have chat_template.jinja, or chat_template in"
            " tokenizer_config.json"
        )
    return found


def _asked(tokenizer: Tokenizer, template: ChatTemplate, prompt: Sequence[int]) -> list[int]:
    """The text of a prompt as the question of a user; the template's tokens come on top."""
    text = tokenizer.decode(prompt[len(tokenizer.begin) :])
    return tokenizer.encode_parts(template.render([{"role": "user", "content": text}]))


def _tell(way: Way, ways: Sequence[Way]) -> None:
    print(f"{ways.index(way) + 1}/{len(ways)}  {way.drafter} {way.method} {way.budget}", file=sys.stderr, flush=True)


def _named(point: Mapping[str, Any]) -> str:
    return f"{point['drafter']} {point['method']} {point['budget']} T={point['temperature']:g}"


def _show(title: str, points: Sequence[Mapping[str, Any]]) -> None:
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    for temperature in sorted({point["temperature"] for point in points}):
        mine = [point for point in points if point["temperature"] == temperature]
        console.print(f"{title}, T = {temperature:g}", soft_wrap=True, markup=False)
        console.print(_speeds(mine))
        widest = {point["drafter"]: point for point in mine if point["method"] == "tree"}  # the last: the largest
        for point in widest.values():
            console.print(
                f"{_named(point)}: the rank that the target took, of the rounds that got so deep", soft_wrap=True
            )
            console.print(_depths(point))
    runs, equal = (sum(point[key] for point in points) for key in ("prompts", "equal_to_plain"))
    console.print(f"{equal} of {runs} texts are plain decoding's", style=None if equal == runs else "red")


def _speeds(points: Sequence[Mapping[str, Any]]) -> Any:
    from rich.table import Table

    table = Table("drafter", "method")
    for name in ("budget", "tokens/round", "sd", "x chain", "ms/round", "cpu ms", "draft ms", "tokens/s", "x AR"):
        table.add_column(name, justify="right")
    plain = points[0]["tokens_per_second"]
    chains = {point["drafter"]: point["tokens_per_round"] for point in points if point["method"] == "chain"}
    for point in points:
        chain = chains.get(point["drafter"])
        table.add_row(
            point["drafter"],
            point["method"],
            str(point["budget"]),
            f"{point['tokens_per_round']:.2f}",
            f"{point['spread']:.2f}",
            f"{point['tokens_per_round'] / chain:.2f}" if chain else "",
            f"{point['round_ms']:.1f}",
            "-" if point["round_cpu_ms"] is None else f"{point['round_cpu_ms']:.1f}",
            f"{point['draft_ms']:.1f}",
            f"{point['tokens_per_second']:.0f}",
            f"{point['tokens_per_second'] / plain:.2f}",
            end_section=point["method"] == "AR",
        )
    return table


def _depths(point: Mapping[str, Any]) -> Any:
    """What the target took at each depth, of the rounds that got there."""
    from rich.table import Table

    table = Table("depth")
    for low, high in _RANKS:
        table.add_column(f"{low}" if low == high else f"{low}-{high}", justify="right")
    table.add_column("none", justify="right")
    for depth, shares in enumerate(point["taken_by_depth_and_rank"], 1):
        sums = [sum(shares[low - 1 : high]) for low, high in _RANKS]
        table.add_row(str(depth), *(f"{share:.3f}" for share in (*sums, 1 - sum(shares))))
    return table
