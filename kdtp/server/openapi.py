"""The OpenAPI document, made of the types that decode the bodies: what it says is what is accepted."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from kdtp.server.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from kdtp.version import __version__

_BODIES = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/tokenize": TokenizeBody,
    "/detokenize": DetokenizeBody,
}
_PAGES = {
    "/v1/models": "The model that is served.",
    "/v1/models/{name}": "One model by its name.",
    "/v1/status": "What the engine is doing: figures since its start.",
    "/v1/requests": "Open requests: id, tokens, age, what they have cost.",
    "/v1/requests/{id}/{choice}/rounds": "The draft trees of an open request as they are verified.",
    "/metrics": "Figures for Prometheus.",
    "/openapi.json": "This document.",
}
_PARAMETERS: dict[str, Any] = {
    "name": {"type": "string"},
    "id": {"type": "string"},
    "choice": {"type": "integer", "minimum": 0},
}
_KINDS = {"/metrics": "text/plain", "/v1/requests/{id}/{choice}/rounds": "text/event-stream"}
_STREAMS = ("/v1/chat/completions", "/v1/completions")
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_OBJECT = {"schema": {"type": "object"}}


def document(with_keys: bool) -> dict[str, Any]:
    """The document; with_keys: whether clients must show a key."""
    references, components = msgspec.json.schema_components(
        list(_BODIES.values()), ref_template="#/components/schemas/{name}"
    )
    bodies = dict(zip(_BODIES, references, strict=True))
    paths: dict[str, Any] = {path: {"get": _get(path, text)} for path, text in _PAGES.items()}
    paths |= {path: {"post": _post(path, body, bodies[path])} for path, body in _BODIES.items()}
    paths["/health"] = {"get": {"summary": "The engine's state; needs no key.", "security": [], "responses": _health()}}
    found: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "kdtp", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**components, "Error": _ERROR}},
    }
    if with_keys:
        found["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        found["security"] = [{"key": []}]
    return found


def _get(path: str, text: str) -> dict[str, Any]:
    kind = _KINDS.get(path, "application/json")
    operation: dict[str, Any] = {"summary": text, "responses": _responses({kind: {}}, 401, 503)}
    names = re.findall(r"{(\w+)}", path)
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": _PARAMETERS[name]} for name in names
        ]
        operation["responses"] |= _responses({}, 404)
    return operation


def _post(path: str, body: type, reference: dict[str, Any]) -> dict[str, Any]:
    kinds = {"application/json": _OBJECT} | ({"text/event-stream": {}} if path in _STREAMS else {})
    return {
        "summary": (body.__doc__ or "").partition(".")[0] + ".",
        "requestBody": {"required": True, "content": {"application/json": {"schema": reference}}},
        "responses": _responses(kinds, 400, 401, 404, 408, 413, 415, 500, 503),
    }


def _responses(kinds: dict[str, Any], *errors: int) -> dict[str, Any]:
    schema = {"schema": {"$ref": "#/components/schemas/Error"}}
    failed = {str(code): {"description": "error", "content": {"application/json": schema}} for code in errors}
    return ({"200": {"description": "done", "content": kinds}} if kinds else {}) | failed


def _health() -> dict[str, Any]:
    content = {"application/json": _OBJECT}
    return {"200": {"description": "ready", "content": content}, "503": {"description": "not", "content": content}}
