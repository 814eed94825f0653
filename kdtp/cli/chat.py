"""`kdtp chat`: talk with a model on the terminal. Ctrl-C stops an answer, not the program."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

import msgspec

from kdtp.cli import remote
from kdtp.cli.answer import Answer, Chat, add_text_flags, find_tokenizer
from kdtp.cli.flags import add_engine_flags, add_sampling_flags, engine_config, sampling
from kdtp.cli.screen import Screen, printable
from kdtp.cli.talk import Talk
from kdtp.client import KEY_VARIABLE
from kdtp.config import ConfigError
from kdtp.engine.api import Engine
from kdtp.engine.plan import Plan, plan
from kdtp.engine.rpc import EngineDead
from kdtp.messages import Finished, Tokens, Usage
from kdtp.text import template
from kdtp.text.files import TextError
from kdtp.text.stream import check_stops
from kdtp.text.template import Message
from kdtp.text.tokenizer import Tokenizer
from kdtp.types import SamplingParams

EXIT_ENGINE = 70


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "--url", help="of an endpoint to talk with, instead of an engine of its own; --model is a name there"
    )
    parser.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"the endpoint's key, if it needs one (default: ${KEY_VARIABLE})",
    )
    add_text_flags(parser)
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="of one answer (default: what the context has left)"
    )
    add_sampling_flags(parser)
    add_engine_flags(parser)


def run(chosen: argparse.Namespace) -> int:
    """Talk until the end of input."""
    if chosen.url is not None:
        return remote.run(chosen)
    if chosen.api_key_file is not None:
        raise ValueError("--api-key-file: is for --url")
    checked = plan(engine_config(chosen))
    if checked.config.drafter.name == "oracle":
        raise ConfigError("drafter = 'oracle': knows only the model file's own prompt; must be none, ngram or dflash")
    check_stops(chosen.stop)
    tokenizer = find_tokenizer(checked.config, checked.model.vocab_size, needed=True)
    assert tokenizer is not None
    found = template.load(tokenizer)
    if found is None:
        raise TextError(f"{tokenizer.folder}: no chat template; `kdtp generate` continues a text without one")
    chat = Chat(tokenizer, found, chosen)
    chat.ids([{"role": "user", "content": "?"}])  # bad flags fail before anything is loaded
    params = sampling(
        chosen, 1 << 24 if chosen.max_tokens is None else chosen.max_tokens, tuple(sorted(tokenizer.stop_ids)), False
    )
    for note in checked.notes:
        print(note, file=sys.stderr)
    try:
        screen = Screen(0, quiet=False)
        with contextlib.ExitStack() as stack:
            with screen:
                engine = stack.enter_context(Engine.of(checked.config, screen.load))
            Conversation(checked, engine, tokenizer, chat, params, tuple(chosen.stop)).talk()
    except EngineDead as error:
        print(f"kdtp chat: {error}", file=sys.stderr)
        return EXIT_ENGINE
    return 0


class Conversation(Talk):
    """With an engine of its own."""

    def __init__(
        self,
        checked: Plan,
        engine: Engine,
        tokenizer: Tokenizer,
        chat: Chat,
        params: SamplingParams,
        stops: tuple[str, ...],
    ) -> None:
        super().__init__()
        self._plan = checked
        self._engine = engine
        self._tokenizer = tokenizer
        self._chat = chat
        self._params = params
        self._stops = stops

    def _answer(self, line: str) -> None:
        asked: list[Message] = [*self._messages, {"role": "user", "content": line}]
        prompt = self._chat.ids(asked)
        params = self._fit(len(prompt))
        ends = {*params.stop_tokens, *self._plan.model.eos_token_ids}
        answer = Answer(self._tokenizer, ends, self._stops, _show, self._chat.parser(prompt))
        started = time.monotonic()
        with self._interrupts.answering():
            usage = self._run(prompt, params, answer)
        print()
        _tell(answer.used, usage, time.monotonic() - started, self._interrupts.stopped)
        if answer.text:  # an answer that was stopped counts as far as it came
            self._messages = [*asked, answer.message()]

    def _run(self, prompt: tuple[int, ...], params: SamplingParams, answer: Answer) -> Usage:
        def cancelled() -> bool:
            return answer.is_cut or self._interrupts.stopped

        usage = Usage()
        for event in self._engine.stream(prompt, params, cancelled=cancelled):
            if isinstance(event, Tokens):
                answer.take(event)
            elif isinstance(event, Finished):
                usage = event.usage
        answer.end()
        return usage

    def _fit(self, prompt: int) -> SamplingParams:
        """The parameters, for no more tokens than the context and the KV cache have room for."""
        config, model = self._plan.config, self._plan.model
        most = min(model.max_position_embeddings, config.kv_tokens - config.drafter.budget - 1)
        if prompt >= most:
            raise ValueError(f"the conversation has {prompt} tokens, there is room for {most}; /reset begins a new one")
        return msgspec.structs.replace(self._params, max_tokens=min(self._params.max_tokens, most - prompt))


def _show(text: str) -> None:
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def _tell(tokens: int, usage: Usage, seconds: float, stopped: bool) -> None:
    rounds = f", {usage.committed / usage.rounds:.2f} per round" if usage.rounds else ""
    rate = f"{tokens / seconds:.1f} tokens/s" if seconds else ""
    print(f"[{'stopped; ' if stopped else ''}{tokens} tokens, {rate}{rounds}]", file=sys.stderr)
