"""`kdtp generate`: complete one prompt, show what speculation did, and on request prove that it changed nothing."""

from __future__ import annotations

import argparse
import json
import reprlib
import sys
from collections.abc import Sequence

from kdtp.cli.check import check
from kdtp.cli.flags import add_engine_flags, engine_config
from kdtp.cli.screen import Screen, report
from kdtp.engine.api import Engine, describe
from kdtp.engine.plan import Golden, Plan, plan
from kdtp.engine.request import Request
from kdtp.engine.rpc import EngineDead
from kdtp.engine.scheduler import check_request
from kdtp.types import SamplingParams

EXIT_MISMATCH = 1
EXIT_ENGINE = 70


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("--prompt-tokens", type=_ids, metavar="ID,ID,…", help="default: the model file's own prompt")
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="default: as many as the file's golden tokens, or 128"
    )
    parser.add_argument("--stop-tokens", type=_ids, default=(), metavar="ID,ID,…", help="end after one of these")
    parser.add_argument("--ignore-eos", action="store_true", help="the model's own end tokens do not end the text")
    for flag, kind, text in (
        ("temperature", float, "0: greedy"),
        ("top-p", float, "keep the most likely ids up to this probability"),
        ("top-k", int, "keep the K most likely ids (0: all)"),
        ("min-p", float, "keep ids at least this likely, relative to the best"),
        ("seed", int, "the text is a function of prompt and seed"),
    ):
        default = getattr(SamplingParams(), flag.replace("-", "_"))
        parser.add_argument(f"--{flag}", type=kind, default=default, help=f"{text} (default {default})")
    parser.add_argument("--check", action="store_true", help="also decode plainly, compare tokens and logits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)}: must be token ids, such as 5 or 5,6,7") from None


def run(chosen: argparse.Namespace) -> int:
    """Generate and report; exit code 0 only if every check that was asked for holds."""
    checked = plan(engine_config(chosen))
    prompt, params = _request(chosen, checked)
    check_request(Request(1, prompt, params), checked.config, checked.model)  # before anything is loaded
    for note in checked.notes:
        print(note, file=sys.stderr)
    screen = Screen(params.max_tokens, quiet=chosen.json)
    try:
        with screen, Engine.of(checked.config, screen.load) as engine:
            done = engine.generate([prompt], params, True, chosen.check, screen.tokens)[0]
            plain = engine.generate([prompt], params, False, True)[0] if chosen.check else None
    except EngineDead as error:
        print(f"kdtp generate: {error}", file=sys.stderr)
        return EXIT_ENGINE
    verdict = check(done, plain, _golden_for(checked, prompt, params)) if plain else None
    if chosen.json:
        print(json.dumps(describe(done) | (verdict.figures() if verdict else {})))
    else:
        report(done, verdict, _method(checked))
    return 0 if verdict is None or verdict.holds else EXIT_MISMATCH


def _request(chosen: argparse.Namespace, checked: Plan) -> tuple[tuple[int, ...], SamplingParams]:
    golden = checked.golden
    prompt = chosen.prompt_tokens if chosen.prompt_tokens is not None else (golden.prompt if golden else ())
    if chosen.prompt_tokens == ():
        raise ValueError("--prompt-tokens = '': must be at least one token id, such as 5 or 5,6,7")
    if not prompt:
        raise ValueError("--prompt-tokens: is missing, and the model file has no prompt of its own")
    if checked.config.drafter.name == "oracle" and (golden is None or prompt != golden.prompt):
        raise ValueError("drafter = 'oracle': knows only the model file's own prompt; leave out --prompt-tokens")
    own = golden is not None and prompt == golden.prompt
    most = chosen.max_tokens if chosen.max_tokens is not None else (len(golden.tokens) if golden and own else 128)
    sampling = SamplingParams(
        max_tokens=most,
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        min_p=chosen.min_p,
        seed=chosen.seed,
        stop_tokens=chosen.stop_tokens,
        ignore_eos=chosen.ignore_eos,
    )
    return prompt, sampling


def _golden_for(checked: Plan, prompt: Sequence[int], params: SamplingParams) -> Golden | None:
    """The part of the golden continuation that this request must give, if it is one of that text."""
    golden = checked.golden
    if golden is None or tuple(prompt) != golden.prompt or params.temperature != 0.0:
        return None
    stops = {*params.stop_tokens, *(() if params.ignore_eos else checked.model.eos_token_ids)}
    end = next((i for i, token in enumerate(golden.tokens, 1) if token in stops), len(golden.tokens))
    end = min(end, params.max_tokens)
    return Golden(golden.prompt, golden.tokens[:end], golden.logits[:end])


def _method(checked: Plan) -> str:
    drafter = checked.config.drafter
    if drafter.name == "none" or drafter.budget == 0 or drafter.block == 1:
        return "AR"
    return "chain" if drafter.shape == "chain" else "DDTree"
