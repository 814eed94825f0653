"""The engine's settings as command-line flags: flag before file before default, defaults from the config's fields."""

from __future__ import annotations

import argparse
import dataclasses
import json
import reprlib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kdtp.config import BUSY_WAITS, DEVICES, DRAFTERS, DTYPES, ConfigError, DrafterConfig, EngineConfig, build
from kdtp.files import distinct
from kdtp.text.files import check_unicode
from kdtp.types import Grammar, SamplingParams
from kdtp.values import refuse_unknown

_ENGINE = {
    "model": "model folder as published, KDTR file, or pair: the small one that ships",
    "tp": "number of ranks the model is split over",
    "device": f"one of {', '.join(DEVICES)}",
    "dtype": f"one of {', '.join(DTYPES)}",
    "threads": "CPU threads per rank, at most 8 (0: one for a small model, else cores / ranks)",
    "kv_tokens": "rows of KV cache per rank (0: automatic)",
    "max_batch": "sequences per forward",
    "prefill_chunk": "prompt tokens per forward, of all sequences",
    "graphs": "on a GPU, run decoding and verification as CUDA graphs; a CPU has none",
    "busy_wait": f"one of {', '.join(BUSY_WAITS)}: processes of ranks poll before they sleep (auto: GPUs, many cores)",
    "prefix_cache": "requests whose texts begin alike share KV pages",
    "max_queue": "requests that may wait (at least 1: each waits for the next step)",
    "max_queue_tokens": "tokens of requests that may wait, unless it is one alone",
    "tokenizer": "folder of the tokenizer files (default: where the model is)",
    "step_timeout": "seconds a forward may take before the engine counts as hung",
    "load_timeout": "seconds loading may take",
    "stall_timeout": "seconds loading may stand still",
    "ping_interval": "seconds of idleness before every rank is asked for a sign of life",
}
_DRAFTER = {
    "name": ("drafter", f"one of {', '.join(DRAFTERS)}"),
    "block": ("block", "tokens a round can commit: draft depth + 1"),
    "budget": ("budget", "tree nodes per round, root not counted; 0 decodes plainly"),
    "topk": ("topk", "candidates per depth"),
    "shape": ("shape", "tree, chain for the most likely path only, or seeded for that path and the best others"),
    "width": ("width", "budget: verify all its nodes in every round; auto: as many as pay, by measured time"),
    "hit": ("oracle-hit", "oracle: chance to know each depth, e.g. 0.9 or 1,0.8,0.6"),
    "rank": ("oracle-rank", "oracle: the truth stands at a random rank below this"),
    "seed": ("drafter-seed", "oracle: seed of its chances"),
    "ngram_max": ("ngram-max", "ngram: longest match"),
    "model": ("drafter-model", "dflash: folder of the drafter, as published, or pair: the shipped one's"),
    "placement": (
        "drafter-placement",
        "dflash: workers (split over the ranks) or coordinator (whole in its process, on a CPU)",
    ),
    "trees": ("drafter-trees", "dflash: grown on the device that drafts, on the host, or auto: on a GPU that drafts"),
    "window": ("drafter-window", "dflash: how many tokens back it sees (0: as its file says)"),
    "amplitude": ("drafter-amplitude", "dflash: of its rotary embedding, unless its file says one (0: by its YaRN)"),
}
_SHARED = ("block", "budget", "topk", "shape", "width")  # settings of every drafter
_ONLY = {  # settings of one kind of drafter
    **dict.fromkeys(("hit", "rank", "seed"), "oracle"),
    **dict.fromkeys(("placement", "trees", "window", "amplitude"), "dflash"),
    "ngram_max": "ngram",
}
_SAMPLING = (
    ("temperature", float, "0: greedy"),
    ("top-p", float, "keep the most likely ids up to this probability"),
    ("top-k", int, "keep the K most likely ids (0: all)"),
    ("min-p", float, "keep ids at least this likely, relative to the best"),
    ("seed", int, "the text is a function of prompt and seed"),
    ("repetition-penalty", float, "above 1: against ids of prompt and output"),
    ("presence-penalty", float, "above 0: against ids of the output"),
    ("frequency-penalty", float, "above 0: against ids of the output, as often as they have come"),
    ("min-tokens", int, "no end before so many"),
)


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Add how tokens are chosen."""
    for flag, kind, text in _SAMPLING:
        default = getattr(SamplingParams(), flag.replace("-", "_"))
        parser.add_argument(f"--{flag}", type=kind, default=default, help=f"{text} (default {default})")
    grammars = parser.add_mutually_exclusive_group()
    grammars.add_argument("--json-schema", type=Path, metavar="FILE", help="the output is JSON that matches it")
    grammars.add_argument("--regex", metavar="PATTERN", help="the output matches it")


def _grammar(chosen: argparse.Namespace) -> Grammar | None:
    if chosen.json_schema is not None:
        try:
            return Grammar("json_schema", chosen.json_schema.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--json-schema {chosen.json_schema}: {error}") from None
    if chosen.regex is None:
        return None
    check_unicode(chosen.regex, "--regex")
    return Grammar("regex", chosen.regex)


def sampling(
    chosen: argparse.Namespace, max_tokens: int, stop_tokens: tuple[int, ...], ignore_eos: bool
) -> SamplingParams:
    """The SamplingParams of parsed flags."""
    return SamplingParams(
        max_tokens=max_tokens,
        stop_tokens=stop_tokens,
        ignore_eos=ignore_eos,
        grammar=_grammar(chosen),
        **{name: getattr(chosen, name) for name in (flag.replace("-", "_") for flag, *_ in _SAMPLING)},
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add --config and a flag for every setting."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings as TOML or JSON; flags override them")
    add_some_flags(parser, _ENGINE, _DRAFTER)


def add_some_flags(parser: argparse.ArgumentParser, engine: Iterable[str], drafter: Iterable[str]) -> None:
    """Add a flag for each of these settings of EngineConfig and DrafterConfig."""
    _add(parser, EngineConfig, {name: (_flag(name), _ENGINE[name]) for name in engine}, "engine")
    _add(parser, DrafterConfig, {name: _DRAFTER[name] for name in drafter}, "drafter")


def flag_of(dest: str) -> str:
    """The flag of "engine.NAME" or "drafter.NAME" in what was parsed."""
    title, _, name = dest.partition(".")
    return _DRAFTER[name][0] if title == "drafter" else _flag(name)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _add(parser: argparse.ArgumentParser, cls: Any, flags: dict[str, tuple[str, str]], title: str) -> None:
    group = parser.add_argument_group(title)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for name, (flag, text) in flags.items():
        default = fields[name].default
        shown = "" if default in (dataclasses.MISSING, "") else f" (default {_plain(default)})"
        dest, absent = f"{title}.{name}", argparse.SUPPRESS
        if isinstance(default, bool):
            either = argparse.BooleanOptionalAction
            group.add_argument(f"--{flag}", dest=dest, action=either, default=absent, help=text + shown)
            continue
        kind = type(default) if isinstance(default, int | float) else (_floats if isinstance(default, tuple) else str)
        mark = flag.rpartition("-")[2].upper()
        group.add_argument(f"--{flag}", dest=dest, type=kind, default=absent, metavar=mark, help=text + shown)


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _floats(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)}: must be numbers, such as 0.9 or 1,0.8,0.6") from None


def engine_config(chosen: argparse.Namespace, with_drafter: bool = True) -> EngineConfig:
    """The EngineConfig of parsed flags. with_drafter: False where drafters are chosen in another way, so that settings
    of all of them have an effect. ConfigError naming flag or file, key, value and what is legal."""
    path = getattr(chosen, "config", None)
    source = str(path or "command line")
    values = _file(path) if path else {}
    drafter = values.pop("drafter", {})
    if not isinstance(drafter, dict):
        raise ConfigError(f"{source}: drafter = {reprlib.repr(drafter)}: must be a table, with a name and settings")
    origins = {}
    for dest, value in vars(chosen).items():
        title, _, name = dest.partition(".")
        if name and title == "engine":
            values[name], origins[name] = value, f"--{flag_of(dest)}"
        elif name:
            drafter[name] = value
            origins["drafter" if name == "name" else dest] = f"--{flag_of(dest)}"
    refuse_unknown(EngineConfig, values, source)  # a misspelt model is not missing
    if "model" not in values:
        raise ConfigError("model: is missing; give --model PATH")
    if path is None:
        origins["drafter.model"] = "--drafter-model"  # also where it is missing
    config = build(EngineConfig, {**values, "drafter": drafter}, source, origins)
    if with_drafter:
        _refuse_useless(chosen, config.drafter.name)
    return config


def _refuse_useless(chosen: argparse.Namespace, drafter: str) -> None:
    """ConfigError for a flag, not a file's setting, that another drafter has."""
    legal = ", ".join(kind for kind in DRAFTERS if kind != "none")
    for name, kind in {**_ONLY, **dict.fromkeys(_SHARED if drafter == "none" else (), legal)}.items():
        if kind not in drafter and hasattr(chosen, dest := f"drafter.{name}"):
            raise ConfigError(f"--{flag_of(dest)}: has no effect with the drafter {drafter}; is for {kind}", dest)


def _file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text()
        is_json = path.suffix == ".json"
        loaded = json.loads(text, object_pairs_hook=distinct) if is_json else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: {error}") from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"--config {path}: must be a table of settings")
    return loaded


def token_ids(text: str) -> tuple[int, ...]:
    """The value of a flag that takes token ids, "5,6,7"."""
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)}: must be token ids, such as 5 or 5,6,7") from None
