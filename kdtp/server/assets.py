"""The files of the live page. They hold nothing of this server, so they need no key; the page loads nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_FOLDER = Path(__file__).parent / "page"
_KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
PAGE = {"/": "index.html", **{f"/page/{path.name}": path.name for path in _FOLDER.iterdir() if path.suffix in _KINDS}}
_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; " + "; ".join(
    f"{kind}-src 'self'" for kind in ("script", "style", "connect", "img")
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def page_routes() -> list[Route]:
    """One for each file."""
    return [Route(path, _file(name)) for path, name in PAGE.items()]


def _file(name: str) -> Any:
    data, kind = (_FOLDER / name).read_bytes(), _KINDS[Path(name).suffix]

    async def send(request: Request) -> Response:
        return Response(data, headers=_HEADERS, media_type=f"{kind}; charset=utf-8")

    return send
