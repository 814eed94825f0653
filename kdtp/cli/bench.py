"""`kdtp bench`: an endpoint under load (`serve`), an engine at growing contexts (`context`), drafts (`accept`)."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kdtp.bench.load import Load, Range, Record
from kdtp.bench.load import run as run_load
from kdtp.cli import bench_accept, bench_context
from kdtp.client import KEY_VARIABLE, Endpoint, EndpointError, read_key

EXIT_FAILED = 1  # a request failed
_MOST_REQUESTS = 1_000_000


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the benchmarks and what they take."""
    kinds = parser.add_subparsers(dest="bench", required=True, metavar="serve|context|accept")
    serve = kinds.add_parser("serve", help="load on an endpoint: waiting times, throughput, acceptance")
    _add_serve(serve)
    serve.set_defaults(bench=_serve)
    context = kinds.add_parser("context", help="throughput, acceptance and stage times over the length of the context")
    bench_context.add_flags(context)
    _add_plain(context)
    _add_all(context)
    context.set_defaults(bench=bench_context.run)
    accept = kinds.add_parser("accept", help="tokens per round on held-out text, by drafter, budget and temperature")
    bench_accept.add_flags(accept)
    _add_all(accept)
    accept.set_defaults(bench=bench_accept.run)


def run(chosen: argparse.Namespace) -> int:
    """Measure; exit code 1 if a request failed."""
    if chosen.png is not None:
        _check_png(chosen.png)
    code: int = chosen.bench(chosen)
    return code


def _check_png(path: Path) -> None:
    """Before anything is measured."""
    if not path.parent.is_dir():
        raise ValueError(f"--png {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise ValueError(f"--png {path}: is a folder; must be a file")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"--png {path}: the folder {path.parent} cannot be written to")


def _add_plain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-speculate", action="store_true", help="plain decoding, to compare with")


def _add_all(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="of what is left to chance (default 0)")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the figures, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


# ---------------------------------------------------------------- serve


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the endpoint (default %(default)s)")
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help=f"the key, if one is needed (default: ${KEY_VARIABLE})"
    )
    parser.add_argument("--model", metavar="NAME", help="default: the endpoint's first")
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="how many (default 64)")
    parser.add_argument("--concurrency", type=int, default=8, metavar="N", help="most at once (default 8)")
    parser.add_argument(
        "--rate", type=float, default=0.0, metavar="R", help="per second, at random times (default: as others end)"
    )
    parser.add_argument("--prompt-tokens", type=_range, default=(64, 64), metavar="N|A:B", help="default 64")
    parser.add_argument("--max-tokens", type=_range, default=(64, 64), metavar="N|A:B", help="default 64")
    parser.add_argument("--shared-prefix", type=int, default=0, metavar="N", help="tokens that all prompts begin with")
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="texts, one a line (as JSON in a .jsonl), instead of random ids"
    )
    parser.add_argument("--vocab-size", type=int, metavar="N", help="of random ids (default: what the endpoint says)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default 0")
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before it counts (default 2)")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="for a request (default 300)")
    _add_plain(parser)
    _add_all(parser)


def _range(text: str) -> Range:
    found = re.fullmatch(r"(\d{1,7})(?::(\d{1,7}))?", text)
    if not found or not 1 <= int(found[1]) <= int(found[2] or found[1]):
        raise argparse.ArgumentTypeError(f"{text[:40]!r}: must be a count, or two as 16:256")
    return int(found[1]), int(found[2] or found[1])


def _serve(chosen: argparse.Namespace) -> int:
    from kdtp.bench.figures import summary

    _check(chosen)
    endpoint = Endpoint(chosen.url, read_key(chosen.api_key_file), chosen.timeout)
    try:
        load, records = asyncio.run(_measure(endpoint, chosen))
    except EndpointError as error:
        print(f"kdtp bench: {error}", file=sys.stderr)
        return bench_context.EXIT_ENGINE
    found = summary(records)
    if chosen.json:
        print(json.dumps({"model": load.model, "load": _named(load), **found}))
    else:
        _show_load(load, found)
    if chosen.png is not None:
        from kdtp.bench.plot import load_picture

        load_picture(chosen.png, f"{load.model}: {_named(load)}", records, found)
    return EXIT_FAILED if found["failed"] else 0


def _check(chosen: argparse.Namespace) -> None:
    shortest = chosen.prompt_tokens[0]
    for flag, value, legal, want in (
        ("requests", chosen.requests, 1 <= chosen.requests <= _MOST_REQUESTS, f"1..{_MOST_REQUESTS}"),
        ("concurrency", chosen.concurrency, 1 <= chosen.concurrency <= 4096, "1..4096"),
        ("rate", chosen.rate, 0 <= chosen.rate <= 1e6, "0 (as others end) or a rate"),
        ("warmup", chosen.warmup, 0 <= chosen.warmup <= 1000, "0..1000"),
        ("temperature", chosen.temperature, 0 <= chosen.temperature <= 2, "0..2"),
        ("vocab-size", chosen.vocab_size, chosen.vocab_size is None or chosen.vocab_size >= 1, "at least 1"),
        ("timeout", chosen.timeout, 0 < chosen.timeout <= 86400, "above 0, at most 86400"),
        ("shared-prefix", chosen.shared_prefix, 0 <= chosen.shared_prefix < shortest, f"0..{shortest - 1}"),
    ):
        if not legal:
            raise ValueError(f"--{flag} {value}: must be {want}")


async def _measure(endpoint: Endpoint, chosen: argparse.Namespace) -> tuple[Load, list[Record]]:
    from dataclasses import replace

    texts = _texts(chosen.prompts)
    name, size = await endpoint.model()
    size = chosen.vocab_size or size
    if not texts and size < 1:
        raise ValueError("--vocab-size: the endpoint does not say how many ids there are; give it, or --prompts")
    load = Load(
        model=chosen.model or name,
        requests=chosen.requests,
        concurrency=chosen.concurrency,
        rate=chosen.rate,
        prompt_tokens=chosen.prompt_tokens,
        max_tokens=chosen.max_tokens,
        vocab_size=size,
        texts=texts,
        shared=chosen.shared_prefix,
        temperature=chosen.temperature,
        speculate=not chosen.no_speculate,
        seed=chosen.seed,
        timeout=chosen.timeout,
    )
    if chosen.warmup:
        await run_load(endpoint, replace(load, requests=chosen.warmup, rate=0.0, seed=chosen.seed + (1 << 32)))
    return load, await _drawn(endpoint, load)


async def _drawn(endpoint: Endpoint, load: Load) -> list[Record]:
    """Run the load with a bar, on a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("requests", total=load.requests)
        return await run_load(endpoint, load, lambda record: bars.advance(task))


def _texts(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        texts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        if path.suffix == ".jsonl":
            texts = [json.loads(line) for line in texts]
    except (OSError, ValueError) as error:
        raise ValueError(f"--prompts {path}: {error}") from None
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise ValueError(f"--prompts {path}: text {i + 1} = {text!r:.40}: must be a text, not empty")
    if not texts:
        raise ValueError(f"--prompts {path}: has no text")
    return texts


def _named(load: Load) -> str:
    rate = f"{load.rate:g}/s" if load.rate else "as others end"
    lengths = [str(a) if a == b else f"{a}..{b}" for a, b in (load.prompt_tokens, load.max_tokens)]
    prompt = "texts" if load.texts else lengths[0]
    plain = "" if load.speculate else ", no speculation"
    return f"{load.requests} requests, {load.concurrency} at once, {rate}; {prompt} + {lengths[1]} tokens{plain}"


def _show_load(load: Load, found: Mapping[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{load.model}: {_named(load)}", soft_wrap=True, markup=False)
    table = Table("", "p50", "p90", "p99")
    for key, name in (
        ("first_text_ms", "first text, ms"),
        ("per_token_ms", "each further token, ms"),
        ("gap_ms", "between two texts, ms"),
        ("whole_ms", "whole answer, ms"),
    ):
        table.add_row(name, *(f"{value:.2f}" for value in found[key].values()))
    console.print(table)
    console.print(
        f"{found['tokens_per_second']:.1f} tokens/s, {found['requests_per_second']:.2f} requests/s over "
        f"{found['seconds']:.1f} s; {found['prompt_tokens']} prompt tokens, {found['cached_tokens']} of them cached",
        soft_wrap=True,
    )
    if found["rounds"]:
        depths = " ".join(f"{share:.2f}" for share in found["acceptance_by_depth"]) or "nothing drafted"
        console.print(f"{found['tokens_per_round']:.2f} tokens per round; accepted by depth: {depths}", soft_wrap=True)
    for error, count in found["failed"].items():
        console.print(f"failed: {count} x {error}", style="red", markup=False, soft_wrap=True)
