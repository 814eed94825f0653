"""`kdtp generate`: complete one prompt, show what speculation did, and on request prove that it changed nothing."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass

from kdtp.cli.answer import Answer, Chat, add_text_flags, find_tokenizer
from kdtp.cli.check import check
from kdtp.cli.flags import add_engine_flags, add_sampling_flags, engine_config, sampling, token_ids
from kdtp.cli.screen import Screen, report
from kdtp.engine.api import Completion, Engine, describe
from kdtp.engine.limits import check_request
from kdtp.engine.plan import Golden, Plan, plan
from kdtp.engine.request import Request
from kdtp.engine.rpc import EngineDead
from kdtp.messages import Tokens
from kdtp.text import template
from kdtp.text.files import TextError
from kdtp.text.stream import check_stops
from kdtp.text.tokenizer import Tokenizer
from kdtp.types import SamplingParams

EXIT_MISMATCH = 1
EXIT_ENGINE = 70


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "text", nargs="?", help="what to answer, or to continue if the model has no chat template; - is standard input"
    )
    parser.add_argument("--raw", action="store_true", help="continue the text, although there is a chat template")
    parser.add_argument("--echo", action="store_true", help="show the text before its continuation")
    add_text_flags(parser)
    parser.add_argument(
        "--prompt-tokens", type=token_ids, metavar="ID,ID,…", help="default: the model file's own prompt"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="default: as many as the file's golden tokens, or 128"
    )
    parser.add_argument("--stop-tokens", type=token_ids, default=(), metavar="ID,ID,…", help="end after one of these")
    parser.add_argument("--ignore-eos", action="store_true", help="the model's own end tokens do not end the text")
    add_sampling_flags(parser)
    parser.add_argument("--check", action="store_true", help="also decode plainly, compare tokens and logits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_engine_flags(parser)


@dataclass(frozen=True)
class Job:
    """What is to be done. tokenizer: None where only token ids are known; as_text: show text instead of ids; echo: and
    this before it."""

    plan: Plan
    prompt: tuple[int, ...]
    params: SamplingParams
    tokenizer: Tokenizer | None
    stops: tuple[str, ...]
    as_text: bool
    echo: str

    @property
    def stop_ids(self) -> set[int]:
        """Ids that end the text."""
        return {*self.params.stop_tokens, *(() if self.params.ignore_eos else self.plan.model.eos_token_ids)}


def run(chosen: argparse.Namespace) -> int:
    """Generate and report; exit code 0 only if every check that was asked for holds."""
    job = _job(chosen)
    check_request(Request(1, job.prompt, job.params), job.plan.config, job.plan.model)  # before anything is loaded
    for note in job.plan.notes:
        print(note, file=sys.stderr)
    screen = Screen(job.params.max_tokens, quiet=chosen.json, as_text=job.as_text, echo=job.echo)
    try:
        with screen, Engine.of(job.plan.config, screen.load) as engine:
            done, text = _complete(engine, job, True, chosen.check, screen)
            plain = _complete(engine, job, False, True, None)[0] if chosen.check else None
    except EngineDead as error:
        print(f"kdtp generate: {error}", file=sys.stderr)
        return EXIT_ENGINE
    verdict = check(done, plain, _golden_for(job)) if plain else None
    if chosen.json:
        texts = {} if text is None else {"text": text}
        print(json.dumps(describe(done) | texts | (verdict.figures() if verdict else {})))
    else:
        report(done, verdict, _method(job.plan), sys.stderr if job.as_text else sys.stdout)
    return 0 if verdict is None or verdict.holds else EXIT_MISMATCH


def _complete(
    engine: Engine, job: Job, speculate: bool, want_logits: bool, screen: Screen | None
) -> tuple[Completion, str | None]:
    """The completion, and its text if there is a tokenizer. screen: shows it as it comes."""
    show = screen.text if screen and job.as_text else lambda text: None
    answer = Answer(job.tokenizer, job.stop_ids, job.stops, show) if job.tokenizer else None

    def take(index: int, message: Tokens) -> bool:
        if screen:
            screen.tokens(index, message)
        return answer is not None and answer.take(message)

    done = engine.generate([job.prompt], job.params, speculate, want_logits, take)[0]
    if answer is None:
        return done, None
    answer.end()
    return answer.cut(done), answer.text


def _job(chosen: argparse.Namespace) -> Job:
    checked = plan(engine_config(chosen))
    _refuse_useless(chosen)
    check_stops(chosen.stop)
    as_text = chosen.text is not None
    tokenizer = None
    if as_text or chosen.stop or checked.config.tokenizer or chosen.json:
        needed = as_text or bool(chosen.stop)
        tokenizer = find_tokenizer(checked.config, checked.model.vocab_size, needed)
    ends, echo = set(chosen.stop_tokens), ""
    if as_text and tokenizer:
        prompt = _text_prompt(chosen, tokenizer)
        echo = tokenizer.decode(prompt[len(tokenizer.begin) :]) if chosen.echo else ""
        ends |= set() if chosen.ignore_eos else tokenizer.stop_ids
    else:
        prompt = _token_prompt(chosen, checked.golden)
    if checked.config.drafter.name == "oracle" and (checked.golden is None or prompt != checked.golden.prompt):
        raise ValueError("drafter = 'oracle': knows only the model file's own prompt; give no other one")
    params = sampling(chosen, _length(chosen, checked, prompt), tuple(sorted(ends)), chosen.ignore_eos)
    return Job(checked, prompt, params, tokenizer, tuple(chosen.stop), as_text, echo)


def _refuse_useless(chosen: argparse.Namespace) -> None:
    """ValueError for flags that would have no effect."""
    if chosen.text is not None and chosen.prompt_tokens is not None:
        raise ValueError("--prompt-tokens: there is a text too; must be one of them")
    of_chat = {"--system": chosen.system is not None, "--template-set": bool(chosen.template_set)}
    for flag, given in ({"--raw": chosen.raw, "--echo": chosen.echo} | of_chat).items():
        if given and chosen.text is None:
            raise ValueError(f"{flag}: has no effect without a text")
    for flag, given in of_chat.items():
        if given and chosen.raw:
            raise ValueError(f"{flag}: has no effect with --raw")
    if chosen.echo and chosen.json:
        raise ValueError("--echo: has no effect with --json")


def _text_prompt(chosen: argparse.Namespace, tokenizer: Tokenizer) -> tuple[int, ...]:
    text = _standard_input() if chosen.text == "-" else chosen.text
    found = None if chosen.raw else template.load(tokenizer)
    if found is not None:
        if chosen.echo:
            raise ValueError("--echo: is for a text that is continued, and this one is answered; give --raw, too")
        return Chat(tokenizer, found, chosen).ids([{"role": "user", "content": text}])
    if chosen.system is not None or chosen.template_set:
        flag = "--template-set" if chosen.system is None else "--system"
        raise ValueError(f"{flag}: has no effect, since {tokenizer.folder} has no chat template")
    if not text:
        raise ValueError("text = '': must be at least one character")
    return (*tokenizer.begin, *tokenizer.encode(text))


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise TextError(f"standard input: {error}") from None


def _token_prompt(chosen: argparse.Namespace, golden: Golden | None) -> tuple[int, ...]:
    if chosen.prompt_tokens == ():
        raise ValueError("--prompt-tokens = '': must be at least one token id, such as 5 or 5,6,7")
    if chosen.prompt_tokens:
        prompt: tuple[int, ...] = chosen.prompt_tokens
        return prompt
    if golden is None:
        raise ValueError("--prompt-tokens: is missing, and the model file has no prompt of its own; or give a text")
    return golden.prompt


def _length(chosen: argparse.Namespace, checked: Plan, prompt: tuple[int, ...]) -> int:
    if chosen.max_tokens is not None:
        most: int = chosen.max_tokens
        return most
    golden = checked.golden
    return len(golden.tokens) if golden is not None and prompt == golden.prompt else 128


def _golden_for(job: Job) -> Golden | None:
    """The part of the golden continuation that this request must give, if it is one of that text."""
    golden = job.plan.golden
    rule = job.params.rule(len(job.prompt), job.stop_ids)
    other = rule.temperature != 0.0 or rule.edits or job.params.grammar is not None or bool(job.stops)
    if golden is None or job.prompt != golden.prompt or other:
        return None
    end = next((i for i, token in enumerate(golden.tokens, 1) if token in job.stop_ids), len(golden.tokens))
    end = min(end, job.params.max_tokens)
    return Golden(golden.prompt, golden.tokens[:end], golden.logits[:end])


def _method(checked: Plan) -> str:
    drafter = checked.config.drafter
    if drafter.name == "none" or drafter.budget == 0 or drafter.block == 1:
        return "AR"
    return "chain" if drafter.shape == "chain" else "DDTree"
