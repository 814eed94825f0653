"""What the endpoint is doing: figures, open requests, the draft trees of one of them."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kdtp.messages import Usage
from kdtp.server.answer import PING, send_event, send_part, start_answer, until_gone
from kdtp.server.driver import Driver
from kdtp.server.errors import ApiError
from kdtp.server.journal import Job
from kdtp.server.prompts import Model
from kdtp.text.tokenizer import Tokenizer
from kdtp.types import NO_TOKEN
from kdtp.version import __version__
from kdtp.watch import Round

_MOST_WATCHERS = 16
_PING = 5.0  # seconds of silence until a watcher is told that we live


class Live:
    """The handlers. Each may raise ApiError."""

    def __init__(self, model: Model, driver: Driver) -> None:
        self._model, self._driver = model, driver
        self._watchers = 0
        self._started = time.monotonic()

    def routes(self) -> list[Route]:
        """Their paths."""
        return [
            Route("/v1/status", self.status),
            Route("/v1/requests", self.requests),
            Route("/v1/requests/{id}/{choice}/rounds", self.rounds),
        ]

    async def status(self, request: Request) -> Response:
        """The engine's figures since it started; the tokens are those since the server did."""
        health, status, config = self._driver.health, self._driver.status, self._model.plan.config
        counts = self._driver.metrics.counts
        body: dict[str, Any] = {
            "state": health.state,
            "reason": health.reason,
            "progress": {"done": health.done, "total": health.total},
            "restarts": health.restarts,
            "model": self._model.name,
            "version": __version__,
            "tp": config.tp,
            "drafter": msgspec.to_builtins(config.drafter),
            "uptime": round(time.monotonic() - self._started, 3),
            "prompt_tokens": counts["prompt_tokens"],
            "generation_tokens": counts["generation_tokens"],
        }
        if status is not None:
            body |= {
                "running": status.running,
                "waiting": status.waiting,
                "pages": {"total": status.pages_total, "free": status.pages_free, "idle": status.pages_idle},
                "steps": status.step,
                "stage_ms": status.stage_ms,
                "accepted": status.accepted,
            }
        return _json(body)

    async def requests(self, request: Request) -> Response:
        """What is open: the HTTP request's id, its tokens, its age in seconds, and what it has cost so far."""
        return _json({"object": "list", "data": [self._entry(job) for job in self._driver.jobs()]})

    def _entry(self, job: Job) -> dict[str, Any]:
        usages = self._driver.status.usages if self._driver.status else {}
        usage = usages.get(job.label or 0, Usage())
        return {
            "id": job.id,
            "choice": job.choice,
            "prompt_tokens": len(job.prompt),
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": len(job.given),
            "max_tokens": job.params.max_tokens,
            "age": round(time.monotonic() - job.started, 3),
            "rounds": usage.rounds,
            "tokens_per_round": round(usage.committed / usage.rounds, 4) if usage.rounds else 0.0,
            "drafted_by_depth": usage.drafted_by_depth,
            "accepted_by_depth": usage.accepted_by_depth,
            "preemptions": usage.preemptions,
            "timings_ms": usage.timings_ms,
        }

    async def rounds(self, request: Request) -> Rounds:
        """The trees of an open request as they are verified, as SSE; a slow reader is shown the newest."""
        wanted = request.path_params["id"], request.path_params["choice"]
        job = next((job for job in self._driver.jobs() if (job.id, str(job.choice)) == wanted), None)
        if job is None:
            text = f"{wanted[0][:64]!r}: has no open choice {wanted[1][:20]!r}"
            raise ApiError(404, text, "id", "request_not_found")
        if self._watchers >= _MOST_WATCHERS:
            raise ApiError(429, f"{self._watchers} watchers are there already: that is the most")
        self._watchers += 1  # now: many may ask in one turn of the event loop
        return Rounds(self, job)

    async def watch(self, job: Job, send: Send) -> None:
        """Send a job's rounds until it ends."""
        with self._driver.watching(job) as watcher:
            await start_answer(send)
            async for found in watcher.rounds(_PING):
                if found is None:
                    await send_part(send, PING)
                else:
                    await send_event(send, describe(*found, self._model.tokenizer))
            await send_event(send, {"ended": True})
            await send_part(send, b"", more=False)

    def left(self) -> None:
        """One watcher less."""
        self._watchers -= 1


class Rounds:
    """An ASGI response: a request's rounds until it ends or its watcher leaves."""

    def __init__(self, live: Live, job: Job) -> None:
        self._live, self._job = live, job

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Show them."""
        tasks = {asyncio.create_task(self._live.watch(self._job, send)), asyncio.create_task(until_gone(receive))}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self._live.left()
            for task in tasks:
                task.cancel()


def describe(number: int, shown: Round, tokenizer: Tokenizer) -> dict[str, Any]:
    """A round as the page draws it. number: how many have come; p: each node's probability given its parent."""
    nodes = [
        {"token": token, "text": _text(tokenizer, token), "parent": parent, "p": _given_parent(shown, node)}
        for node, (token, parent) in enumerate(zip(shown.tokens, shown.parents, strict=True))
    ]
    bonus = None if shown.bonus == NO_TOKEN else {"token": shown.bonus, "text": _text(tokenizer, shown.bonus)}
    return {
        "number": number,
        "position": shown.position,
        "nodes": nodes,
        "path": shown.path,
        "bonus": bonus,
        "timings_ms": shown.timings_ms,
    }


def _given_parent(shown: Round, node: int) -> float:
    parent = shown.parents[node]
    return 1.0 if parent < 0 else round(math.exp(shown.scores[node] - shown.scores[parent]), 6)


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
