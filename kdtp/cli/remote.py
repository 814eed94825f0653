"""`kdtp chat --url`: the same conversation with an OpenAI-style endpoint."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

from kdtp.cli.answer import template_variables
from kdtp.cli.flags import flag_of, sampling
from kdtp.cli.screen import printable
from kdtp.cli.talk import Talk
from kdtp.client import Endpoint, EndpointError, read_key
from kdtp.text.template import Message
from kdtp.types import SamplingParams

_LOOK = 0.2  # seconds between two looks at Ctrl-C
_SENT = ("top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")


def run(chosen: argparse.Namespace) -> int:
    """Talk until the end of input; 70 if the endpoint cannot be reached."""
    _refuse_local(chosen)
    endpoint = Endpoint(chosen.url, read_key(chosen.api_key_file))
    try:
        model = getattr(chosen, "engine.model", None) or asyncio.run(endpoint.model())[0]
    except EndpointError as error:
        print(f"kdtp chat: {error}", file=sys.stderr)
        return 70
    system: list[Message] = [] if chosen.system is None else [{"role": "system", "content": chosen.system}]
    Remote(endpoint, _body(chosen, model), system).talk()
    return 0


def _refuse_local(chosen: argparse.Namespace) -> None:
    """ValueError for a flag that is for an engine of our own."""
    ours = [flag_of(dest) for dest in vars(chosen) if "." in dest and dest != "engine.model"]
    ours += [name for name in ("config", "regex") if getattr(chosen, name) is not None]
    if ours:
        raise ValueError(f"--{ours[0]}: is not for an endpoint (--url)")


def _body(chosen: argparse.Namespace, model: str) -> dict[str, Any]:
    """What each request asks for: temperature, and what differs from the default."""
    most = 1 if chosen.max_tokens is None else chosen.max_tokens
    params, usual = sampling(chosen, max(most, chosen.min_tokens), (), False), SamplingParams()
    body: dict[str, Any] = {"model": model, "temperature": params.temperature, "stream": True}
    body |= {name: value for name in _SENT if (value := getattr(params, name)) != getattr(usual, name)}
    if chosen.max_tokens is not None:
        body["max_completion_tokens"] = chosen.max_tokens
    if chosen.stop:
        body["stop"] = chosen.stop
    if params.grammar is not None:
        schema = {"name": "answer", "schema": json.loads(params.grammar.text)}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if variables := template_variables(chosen):
        body["chat_template_kwargs"] = variables
    return body | {"stream_options": {"include_usage": True}}


class Remote(Talk):
    """With an endpoint."""

    def __init__(self, endpoint: Endpoint, body: Mapping[str, Any], system: list[Message]) -> None:
        super().__init__()
        self._endpoint, self._body, self._system = endpoint, body, system

    def _answer(self, line: str) -> None:
        asked: list[Message] = [*self._messages, {"role": "user", "content": line}]
        started = time.monotonic()
        try:
            with self._interrupts.answering():
                said = asyncio.run(self._read(asked))
        except EndpointError as error:
            raise ValueError(str(error)) from None
        print()
        self._tell(said, time.monotonic() - started)
        if said["content"]:  # an answer that was stopped counts as far as it came
            thought = {"reasoning_content": said["reasoning_content"]} if said["reasoning_content"] else {}
            self._messages = [*asked, {"role": "assistant", "content": said["content"], **thought}]

    async def _read(self, asked: list[Message]) -> dict[str, Any]:
        """The answer as it comes, shown; Ctrl-C leaves, which ends the request there."""
        said: dict[str, Any] = {"content": "", "reasoning_content": "", "usage": {}}
        body = {**self._body, "messages": [*self._system, *asked]}
        async for event in self._until_stopped(self._endpoint.stream("/v1/chat/completions", body)):
            said["usage"] = event.get("usage") or said["usage"]
            for choice in event.get("choices", []):
                for kind in ("reasoning_content", "content"):
                    text = choice.get("delta", {}).get(kind) or ""
                    said[kind] += text
                    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)
        return said

    async def _until_stopped(self, events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
        while True:
            coming = asyncio.ensure_future(anext(events, None))
            while not coming.done():
                await asyncio.wait({coming}, timeout=_LOOK)
                if self._interrupts.stopped:
                    coming.cancel()
                    return
            event = coming.result()
            if event is None:
                return
            yield event

    def _tell(self, said: Mapping[str, Any], seconds: float) -> None:
        usage = said["usage"]
        tokens, cost = usage.get("completion_tokens"), usage.get("kdtp") or {}
        if tokens is None:
            print("[stopped]" if self._interrupts.stopped else "[no usage]", file=sys.stderr)
            return
        rounds = f", {cost['committed'] / cost['rounds']:.2f} per round" if cost.get("rounds") else ""
        print(f"[{tokens} tokens, {tokens / seconds:.1f} tokens/s{rounds}]", file=sys.stderr)
