"""`kdtp serve`: OpenAI's API over HTTP, with an engine behind it that is started again when it dies."""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path

from kdtp import log, pair
from kdtp.cli.answer import find_tokenizer
from kdtp.cli.flags import add_engine_flags, engine_config
from kdtp.config import ConfigError
from kdtp.engine import guard
from kdtp.engine.plan import plan
from kdtp.log import logger
from kdtp.text import template

_LEAST_KEY = 8  # characters


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: this machine only)")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (default 8000)")
    parser.add_argument(
        "--allowed-host",
        action="append",
        default=[],
        metavar="NAME",
        help="in the Host header, beside the address (a server for this machine alone takes no other)",
    )
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="keys that clients must show, one a line")
    parser.add_argument("--served-model-name", metavar="NAME", help="default: the name of the model's folder or file")
    parser.add_argument("--strict-params", action="store_true", help="unknown fields of a request are errors")
    parser.add_argument(
        "--keep-alive", type=float, default=10.0, metavar="SECONDS", help="of silence until a stream pings (default 10)"
    )
    parser.add_argument(
        "--shutdown-timeout", type=float, default=30.0, metavar="SECONDS", help="for open requests (default 30)"
    )
    parser.add_argument(
        "--max-restarts", type=int, default=3, metavar="N", help="of a dead engine within the window (default 3)"
    )
    parser.add_argument(
        "--restart-window", type=float, default=300.0, metavar="SECONDS", help="for --max-restarts (default 300)"
    )
    parser.add_argument(
        "--generation-config",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="sampling defaults of the model's generation_config.json (default on)",
    )
    log.add_flags(parser)
    add_engine_flags(parser)


def run(chosen: argparse.Namespace) -> int:
    """Serve until told to end (SIGTERM, SIGHUP, Ctrl-C: code 0) or until the engine has died too often (code 70)."""
    try:
        from kdtp.server import defaults
        from kdtp.server.app import Options
        from kdtp.server.prompts import Model
        from kdtp.server.run import Settings, bind, is_loopback, serve
    except ModuleNotFoundError as error:
        raise ValueError(f"the package {error.name} is missing; pip install 'kdtp[serve]'") from None
    log.setup("server", chosen.log_level, chosen.log_format)
    _check(chosen)
    settings = Settings(
        _keys(chosen.api_key_file) if chosen.api_key_file else (),
        chosen.shutdown_timeout,
        chosen.max_restarts,
        chosen.restart_window,
        tuple(name.lower() for name in chosen.allowed_host),
        Options(chosen.strict_params, chosen.keep_alive, chosen.api_key_file is not None),
    )
    bound = bind(chosen.host, chosen.port)  # a taken port is told before anything is read
    config = engine_config(chosen)
    checked = plan(config)
    if checked.config.drafter.name == "oracle":
        raise ConfigError("drafter = 'oracle': knows only the model file's own prompt; must be none, ngram or dflash")
    for note in checked.notes:
        logger.info("%s", note)
    tokenizer = find_tokenizer(checked.config, checked.model.vocab_size, needed=True)
    assert tokenizer is not None
    name = chosen.served_model_name or served_name(config.model)
    usual = defaults.read(Path(checked.config.model)) if chosen.generation_config else {}
    if usual:
        logger.info("sampling by default: %s", ", ".join(f"{key} {value}" for key, value in usual.items()))
    model = Model(name, checked, tokenizer, template.load(tokenizer), usual)
    if not settings.keys and not is_loopback(bound.getsockname()[0]):
        logger.warning("anybody who reaches %s can use this server; give --api-key-file", bound.getsockname()[0])
    host = f"[{chosen.host}]" if ":" in chosen.host else chosen.host
    print(f"http://{host}:{bound.getsockname()[1]}", flush=True)
    guard.leave(asyncio.run(serve(bound, model, settings)))


def _check(chosen: argparse.Namespace) -> None:
    for flag, value, legal, want in (
        ("port", chosen.port, 0 <= chosen.port < 1 << 16, "0..65535"),
        ("keep-alive", chosen.keep_alive, 0.05 <= chosen.keep_alive <= 3600, "0.05..3600"),
        ("shutdown-timeout", chosen.shutdown_timeout, 0 <= chosen.shutdown_timeout <= 86400, "0..86400"),
        ("max-restarts", chosen.max_restarts, 0 <= chosen.max_restarts <= 1000, "0..1000"),
        ("restart-window", chosen.restart_window, 1 <= chosen.restart_window <= 86400, "1..86400"),
    ):
        if not legal:
            raise ValueError(f"--{flag} {value}: must be {want}")
    name = chosen.served_model_name
    if name is not None and not (name.strip() == name != "" and name.isprintable()):
        raise ValueError(f"--served-model-name {name!r}: must be printable, not empty, no space at an end")
    for host in chosen.allowed_host:
        if not re.fullmatch(r"[\w.-]+|\[[\da-fA-F:.]+\]", host):
            raise ValueError(f"--allowed-host {host!r}: must be a name or an address, without scheme and port")


def served_name(model: str) -> str:
    """What a model is called unless told otherwise: its folder's name, its file's without the suffix, or "pair"."""
    path = Path(model).absolute()
    return model if model == pair.NAME else path.name if path.is_dir() else path.stem


def _keys(path: Path) -> tuple[str, ...]:
    """The keys in a file; ValueError if it has none, or one that is easy to guess or cannot be sent."""
    try:
        keys = tuple(line.strip() for line in path.read_text(encoding="ascii").splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--api-key-file {path}: {error}") from None
    if not keys:
        raise ValueError(f"--api-key-file {path}: has no key; must have one a line")
    for i, key in enumerate(keys):
        if len(key) < _LEAST_KEY or not key.isprintable() or " " in key:
            raise ValueError(f"--api-key-file {path}: key {i + 1} must have at least {_LEAST_KEY} characters, no space")
    return keys
