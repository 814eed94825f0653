"""Chat templates: messages in, plain text and control tokens out. Jinja in its sandbox, with limits."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
from jinja2 import nodes

from kdtp.log import logger
from kdtp.text.files import TextError, read_bytes
from kdtp.text.marks import Marker, Marks
from kdtp.text.sandbox import MOST_CHARACTERS, Sandbox, bounded, run
from kdtp.text.tokenizer import Part, Tokenizer
from kdtp.text.typescript import VARIABLE, declare, in_order

MOST_SECONDS = 5.0  # for one rendering
MOST_SOURCE = 1 << 20  # characters
TOOL_USE = "tool_use"  # name of a template for conversations with tools, where a folder has several
_OURS = ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now")

Message = Mapping[str, Any]


def load(tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a model folder: chat_template.jinja, or chat_template in tokenizer_config.json (one, or a
    list of named ones). None if there is none. TextError for one that cannot be used."""
    file = tokenizer.folder / "chat_template.jinja"
    if os.path.lexists(file):
        extra = sorted(tokenizer.folder.glob("additional_chat_templates/*.jinja"))
        return ChatTemplate(tokenizer, {"default": _read(file)} | {path.stem: _read(path) for path in extra}, file)
    where = tokenizer.folder / "tokenizer_config.json"
    given = tokenizer.settings.get("chat_template")
    if given is None:
        return None
    entries = given if isinstance(given, list) else [{"name": "default", "template": given}]
    if not all(isinstance(e, dict) and isinstance(e.get("template"), str) for e in entries):
        raise TextError(f"{where}: chat_template = {reprlib.repr(given)}: must be a text or a list of named ones")
    return ChatTemplate(tokenizer, {str(e.get("name")): e["template"] for e in entries}, where)


def _read(path: Path) -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise TextError(f"{path}: {error}") from None


class ChatTemplate:
    """Renders conversations. Guaranteed: only what the template's author wrote, or one of the tokenizer's own roles
    (bos_token), becomes a control token. No text of a message or tool does, whatever the template does to it.

    For that the names are marked where they stand in the template's source. A template that makes a name of parts
    ("<|" + role + "|>") would lose it; such a template is refused when it is loaded, as its rendering differs from
    what the marks give.
    """

    def __init__(self, tokenizer: Tokenizer, sources: Mapping[str, str], where: Path) -> None:
        self._tokenizer = tokenizer
        self._where = where
        self._marks = Marks(tokenizer.controls)
        self._roles = {role: self._marks.put(name) for role, name in tokenizer.roles.items()}
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        self.variables: frozenset[str] = frozenset()
        self.source = "\n".join(sources.values())
        for name, source in sources.items():
            if len(source) > MOST_SOURCE:
                raise TextError(f"{where}: chat template {name!r}: {len(source)} characters: at most {MOST_SOURCE}")
            try:
                parsed = environment.parse(source)
                self.variables |= _variables(parsed) - {*_OURS, *tokenizer.roles}
                self._templates[name] = environment.from_string(Marker(self._marks).visit(parsed))
                unmarked = Marker(Marks({})).visit(environment.parse(source))
                self._check(name, environment.from_string(unmarked))
            except (jinja2.TemplateError, RecursionError) as error:
                raise TextError(f"{where}: chat template {name!r}: {error}") from None
        if "default" not in self._templates:
            raise TextError(f"{where}: chat_template: none of {sorted(sources)} is named 'default'")

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Part]:
        """The conversation as `Tokenizer.encode_parts` takes it.

        messages, tools: as of the OpenAI API. variables: others that the template reads (`self.variables`), such as
        thinking. TextError if it reads no such variable, refuses the conversation, or takes too long.
        """
        unknown = sorted(set(variables or {}) - self.variables)
        if unknown:
            known = ", ".join(sorted(self.variables)) or "none"
            raise TextError(f"{unknown[0]}: the chat template reads no such variable; it reads {known}")
        name = TOOL_USE if tools and TOOL_USE in self._templates else "default"
        defaults = self._tokenizer.template_defaults
        values = {key: defaults[key] for key in self.variables & {*defaults}} | dict(variables or {})
        given: dict[str, Any] = {"messages": messages, "tools": tools or None}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            if tools and self._tokenizer.sorts_tools:
                given["tools"] = in_order(tools)
                values |= _declared(given["tools"]) if VARIABLE in self.variables - {*values} else {}
            text = _run(self._templates[name], {**values, **self._roles, **given})
        except Exception as error:  # it is a program, and not ours
            text = self._marks.show(str(error)) or type(error).__name__
            raise TextError(f"{self._where}: chat template: {text}") from None
        return self._marks.parts(text)

    def _check(self, name: str, plain: jinja2.Template) -> None:
        """Compare with the unmarked template on conversations that hold no names; TextError where they part."""
        for messages, tools in _SAMPLES:
            given = {"messages": messages, "tools": tools, "add_generation_prompt": True, "strftime_now": str}
            try:
                want = _run(plain, {**self._tokenizer.roles, **given})
            except TextError as error:
                raise TextError(f"{self._where}: chat template {name!r}: {error}") from None
            except Exception:  # not every template takes every conversation
                continue
            try:
                found = self._marks.parts(_run(self._templates[name], {**self._roles, **given}))
            except Exception:
                found = []
            if found != self._tokenizer.split(want):
                what = "makes a control token of parts, or handles one as text"
                raise TextError(f"{self._where}: chat template {name!r}: {what}; such a template is not supported")


def _declared(tools: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The variable of tools as TypeScript. Without it a template writes JSON, which does for what has no such form."""
    try:
        return {VARIABLE: declare(tools)}
    except TextError as error:
        logger.warning("tools are told to the model as JSON, not as TypeScript: %s", error)
        return {}


def _variables(parsed: nodes.Template) -> set[str]:
    """Names that a template reads and does not set, or sets only where they are not defined."""
    free = jinja2.meta.find_undeclared_variables(parsed)
    own = {name.name for name in parsed.find_all(nodes.Name) if name.ctx == "store"}
    asked = [*parsed.find_all(nodes.Test), *parsed.find_all(nodes.Filter)]
    optional = {
        question.node.name
        for question in asked
        if question.name in ("defined", "undefined", "default", "d") and isinstance(question.node, nodes.Name)
    }
    return free - (own - optional)


def _environment() -> Sandbox:
    """Jinja as chat templates expect it."""
    environment = Sandbox()
    environment.filters["tojson"] = _tojson
    return environment


def _run(template: jinja2.Template, given: Mapping[str, Any]) -> str:
    ours = {"raise_exception": _refuse, "strftime_now": _strftime_now, "documents": None}
    return run(template, {**ours, **given}, MOST_SECONDS, MOST_CHARACTERS)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it: Jinja's own filter would escape <, > and &."""
    if indent is not None and not 0 <= indent <= 100:
        raise TextError(f"tojson: indent = {indent}: must be 0..100")
    bounded(value)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_CALL = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
_TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
_ASKED: list[Message] = [{"role": "user", "content": "a question"}]
_TALKED: list[Message] = [
    {"role": "system", "content": "be brief"},
    *_ASKED,
    {"role": "assistant", "content": "an answer"},
    *_ASKED,
]
_LOOKED: list[Message] = [
    *_ASKED,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "functions.look:0", "name": "look", "content": "seen"},
]
_SAMPLES: list[tuple[list[Message], list[Mapping[str, Any]] | None]] = [
    (_ASKED, None),
    (_TALKED, None),
    (_TALKED, [_TOOL]),
    (_LOOKED, [_TOOL]),
]
