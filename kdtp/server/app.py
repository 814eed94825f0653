"""The routes of the endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from kdtp.config import digest
from kdtp.log import logger
from kdtp.server import metrics
from kdtp.server.answer import Answer, Style
from kdtp.server.assets import page_routes
from kdtp.server.bodies import ChatBody, ChatInput, CompletionBody, DetokenizeBody, Sampling, TokenizeBody
from kdtp.server.choice import Choice
from kdtp.server.decode import decode
from kdtp.server.driver import Driver
from kdtp.server.errors import ApiError, invalid
from kdtp.server.forms import ChatForm, CompletionForm
from kdtp.server.gate import read_body, respond
from kdtp.server.live import Live
from kdtp.server.openapi import document
from kdtp.server.prompts import Ask, Model, stop_strings
from kdtp.text.calls import AnswerParser
from kdtp.version import __version__

B = TypeVar("B", bound=Struct)
R = TypeVar("R")
_LARGE = 1 << 18  # bytes of a body that takes long to read, and much memory


@dataclass(frozen=True)
class Options:
    """strict: unknown fields are errors; keep_alive: seconds of silence after which a stream says that it lives;
    with_keys: clients must show a key."""

    strict: bool = False
    keep_alive: float = 10.0
    with_keys: bool = False


class Endpoint:
    """The handlers. Each may raise ApiError."""

    def __init__(self, model: Model, driver: Driver, options: Options) -> None:
        self._model, self._driver, self._options = model, driver, options
        config = model.plan.config
        self._fingerprint = f"kdtp-{__version__}-tp{config.tp}-{digest(config)[:8]}"
        self._turn, self._thread = asyncio.Lock(), ThreadPoolExecutor(1, "large-body")

    def app(self) -> Starlette:
        """The ASGI application, without its gate."""
        routes = [
            *page_routes(),
            *Live(self._model, self._driver).routes(),
            Route("/health", self.health),
            Route("/openapi.json", self.openapi),
            Route("/metrics", self.metrics),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.one_model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
        ]
        handlers: dict[Any, Any] = {ApiError: _on_api_error, HTTPException: _on_http_error, Exception: _on_bug}
        return Starlette(routes=routes, exception_handlers=handlers | {ClientDisconnect: _on_gone})

    # ------------------------------------------------------------------ the engine's state

    async def health(self, request: Request) -> Response:
        """200 only if the engine is ready and has answered of late."""
        health, silence = self._driver.health, self._driver.silence
        state, reason = health.state, health.reason
        longest = self._model.plan.config.step_timeout
        if state == "ready" and silence > longest:
            state, reason = "degraded", f"the engine has not answered for {silence:.0f} s"
        body = {
            "state": state,
            "reason": reason,
            "progress": {"done": health.done, "total": health.total},
            "restarts": health.restarts,
            "model": self._model.name,
            "version": __version__,
        }
        return _json(body, 200 if state == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        """For Prometheus; also while loading."""
        health = self._driver.health
        ratio = health.done / health.total if health.total else 0.0
        driver = self._driver
        text = driver.metrics.text(driver.status, driver.silence, health.state, ratio, health.restarts)
        return Response(text, media_type=metrics.KIND)

    async def openapi(self, request: Request) -> Response:
        """What is accepted."""
        return _json(document(self._options.with_keys))

    async def models(self, request: Request) -> Response:
        """The one model, once it is loaded."""
        self._driver.check()
        return _json({"object": "list", "data": [self._card()]})

    async def one_model(self, request: Request) -> Response:
        """The model by its name."""
        self._driver.check()
        self._model.check_name(request.path_params["name"])
        return _json(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self._model.name, "object": "model", "created": 0, "owned_by": "kdtp"}
        return card | {"max_model_len": self._model.context, "vocab_size": self._model.plan.model.vocab_size}

    # ------------------------------------------------------------------ text

    async def tokenize(self, request: Request) -> Response:
        """Token ids of a text, or of a conversation."""
        body = await self._body(request, TokenizeBody)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt: must be given, or messages, not both", "prompt")
        tokens = await self._off_loop(request, lambda: self._tokens(body))
        if body.messages is not None:
            await self._tell_unread(request, body, tokens)
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": self._model.context})

    def _tokens(self, body: TokenizeBody) -> tuple[int, ...]:
        if body.prompt is not None:
            return self._model.text_ids(body.prompt, body.add_special_tokens is not False)
        return self._model.chat_ids(body)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        body = await self._body(request, DetokenizeBody)
        size = self._model.plan.model.vocab_size
        bad = next((i for i, token in enumerate(body.tokens) if token >= size), None)
        if bad is not None:
            raise ApiError(400, f"tokens[{bad}] = {body.tokens[bad]}: must be below {size}", f"tokens[{bad}]")
        return _json({"prompt": await self._off_loop(request, lambda: self._model.tokenizer.decode(body.tokens))})

    # ------------------------------------------------------------------ generation

    async def completions(self, request: Request) -> Answer:
        """Continue texts."""
        self._driver.check()
        body = await self._body(request, CompletionBody)
        asks = await self._off_loop(request, lambda: self._model.asks_completion(body))
        choices = [self._choice(body, ask) for ask in asks]
        echo = [ask.prompt for ask in asks] if body.echo else None
        form = CompletionForm(self._model.tokenizer, len(asks), body.logprobs is not None, echo)
        return self._answer(request, body, asks, choices, form)

    async def chat(self, request: Request) -> Answer:
        """Answer a conversation."""
        self._driver.check()
        body = await self._body(request, ChatBody)
        asks = await self._off_loop(request, lambda: self._model.asks_chat(body))
        await self._tell_unread(request, body, asks[0].prompt)
        choices = [self._choice(body, ask, self._model.parser(ask.prompt, body)) for ask in asks]
        form = ChatForm(self._model.tokenizer, len(asks), bool(body.logprobs))
        return self._answer(request, body, asks, choices, form)

    def _choice(self, body: Sampling, ask: Ask, parser: AnswerParser | None = None) -> Choice:
        return Choice(self._model.tokenizer, ask.ends, stop_strings(body), parser)

    def _answer(self, request: Request, body: Sampling, asks: list[Ask], choices: list[Choice], form: Any) -> Answer:
        if body.stream_options is not None and not body.stream:
            raise ApiError(400, "stream_options: needs stream = true", "stream_options")
        usage = bool(body.stream_options and body.stream_options.include_usage)
        name = f"{form.prefix}-{request.state.id.removeprefix('req-')}"
        stream, ping = bool(body.stream), self._options.keep_alive
        tools = isinstance(body, ChatBody) and body.tools and body.tool_choice != "none"
        grammar = "tools" if tools else "response_format"
        style = Style(name, self._model.name, self._fingerprint, stream, usage, ping, grammar)
        return Answer(self._driver, asks, choices, body.n or 1, form, style)

    async def _body(self, request: Request, kind: type[B]) -> B:
        data = await read_body(request)
        request.state.size = len(data)
        body, unused = await self._off_loop(request, lambda: decode(data, kind))
        self._tell_unused(request, unused)
        self._model.check_name(body.model)  # type: ignore[attr-defined]
        return body

    async def _tell_unread(self, request: Request, body: ChatInput, prompt: Sequence[int]) -> None:
        self._tell_unused(request, await self._off_loop(request, lambda: self._model.unread(body, prompt)))

    def _tell_unused(self, request: Request, names: Sequence[str]) -> None:
        """Fields that have no effect: the client, and the log; an error if it is to be."""
        if names and self._options.strict:
            field = names[0].partition(" ")[0]
            raise ApiError(400, f"{names[0]}: has no effect (--strict-params)", field, "unknown_parameter")
        if names:
            before = getattr(request.state, "ignored", "")
            request.state.ignored = ", ".join([before] * bool(before) + [*names])
            logger.warning("%s: fields without effect: %s", request.state.id, ", ".join(names))

    async def _off_loop(self, request: Request, function: Callable[[], R]) -> R:
        """Long computations must not stop the streams of others. Those of large bodies go one at a time, in a thread of
        their own, which keeps the memory that it once had: there are threads for others, and memory."""
        large = request.state.size > _LARGE
        try:
            async with self._turn if large else nullcontext():
                if await request.is_disconnected():
                    raise ClientDisconnect()
                return await asyncio.get_running_loop().run_in_executor(self._thread if large else None, function)
        except ValueError as error:  # of a tokenizer
            raise invalid(error) from None


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _on_api_error(request: Request, error: ApiError) -> Response:
    return respond(error)


async def _on_http_error(request: Request, error: HTTPException) -> Response:
    text = {404: "no such path", 405: f"{request.method}: is not a method of this path"}
    headers = error.headers or {}
    return respond(ApiError(error.status_code, text.get(error.status_code, error.detail), headers=headers))


async def _on_gone(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_bug(request: Request, error: Exception) -> Response:
    logger.error("%s: %s", request.state.id, error, exc_info=error)
    return respond(ApiError(500, f"internal error: {type(error).__name__}"))
