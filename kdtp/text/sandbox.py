"""Jinja in its sandbox, with limits of time and size: a chat template is a program, and not ours."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any

from jinja2 import Environment, Template
from jinja2.ext import loopcontrols
from jinja2.nodes import EvalContext
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kdtp.text.files import TextError

MOST_CHARACTERS = 1 << 26
_LARGEST_NUMBER = 100_000  # that a filter or a method may get, such as a width; as the sandbox's range
_MOST_BITS = 4096  # of a product or power
# Fields of format strings that are too wide, or as wide as an argument says.
_WIDE_PERCENT = re.compile(r"%[^%a-zA-Z]*([0-9]{6}|\*)")
_WIDE_FIELD = re.compile(r"\{[^{}]*:[^{}]*([0-9]{6}|\{)")
_WRITES = ("join", "string", "pprint", "tojson")  # filters that make text of all that they get
_SIZED = ("center", "indent", "batch", "slice", "wordwrap", "round", "truncate", "replace")  # that take widths or texts


def run(template: Template, given: Mapping[str, Any], seconds: float, most: int) -> str:
    """What the template makes of the given values. TextError for more than `most` characters, and when its time is
    over: at the next call of a function or step of a generator, which every loop has in the filter `paced`."""
    deadline, before = time.monotonic() + seconds, sys.gettrace()

    def look(*_: object) -> None:
        if time.monotonic() > deadline:
            raise TextError(f"not done after {seconds:.0f} s")

    pieces, total = [], 0
    sys.settrace(look)  # of this thread alone
    try:
        for piece in template.generate(given):
            total += len(piece)
            if total > most:
                raise TextError(f"more than {most} characters")
            pieces.append(piece)
    finally:
        sys.settrace(before)
    return "".join(pieces)


def _paced(items: Iterable[Any]) -> Iterator[Any]:
    return (item for item in items)


def bounded(value: Any) -> Any:
    """The value, if all text in it is no more than MOST_CHARACTERS; TextError else."""
    _weigh(value, 0)
    return value


def _weigh(value: Any, total: int) -> int:
    total += len(value) if isinstance(value, str) else 1
    if total > MOST_CHARACTERS:
        raise TextError(f"more than {MOST_CHARACTERS} characters")
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    for item in value if isinstance(value, list | tuple) else ():
        total = _weigh(item, total)
    return total


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it, without what makes much of little."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], finalize=bounded)
        del self.globals["lipsum"]
        self.filters = {name: _modest(name, function) for name, function in self.filters.items()}
        self.filters["paced"] = _paced
        self.filters["concat"] = lambda items: "".join(map(str, bounded(items)))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if _size(operator, left, right) > MOST_CHARACTERS:
            raise TextError(f"{operator}: makes more than {MOST_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        subject = getattr(__obj, "__self__", None)
        if isinstance(subject, str):
            _refuse_large(__obj.__name__, subject, args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FIELD.search(value.__self__):
            raise TextError("format: a field is too wide")
        return wrapped


def _size(operator: str, left: Any, right: Any) -> int:
    """Characters of a result, at least where it could be many; an integer of too many bits counts as such."""
    if operator == "%":
        return MOST_CHARACTERS + 1 if isinstance(left, str) and _WIDE_PERCENT.search(left) else 0
    if isinstance(left, int) and isinstance(right, int):
        bits = {"**": left.bit_length() * abs(right), "*": left.bit_length() + right.bit_length()}
        return MOST_CHARACTERS + 1 if bits.get(operator, 0) > _MOST_BITS else 0
    sizes = [value if isinstance(value, int) else _length(value) for value in (left, right)]
    return sizes[0] * sizes[1] if operator == "*" else _length(left) + _length(right)


def _length(value: Any) -> int:
    """In characters; an item of a list takes as much as eight."""
    return len(value) if isinstance(value, str) else 8 * len(value) if isinstance(value, list | tuple) else 0


def _modest(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, unless it is given what makes much of little."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = [arg for arg in args if not isinstance(arg, Context | EvalContext | Environment)]
        if name in _WRITES:
            bounded(given)
        if name in _SIZED:
            _refuse_large(name, given[0], given[1:], kwargs)
        if name == "format" and _WIDE_PERCENT.search(str(given[0])):
            raise TextError("format: a field is too wide")
        return function(*args, **kwargs)

    return checked


def _refuse_large(name: str, subject: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """TextError for a width or a replacement that makes much of little."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _LARGEST_NUMBER:
            raise TextError(f"{name}: a number is more than {_LARGEST_NUMBER}")
    texts = [value for value in (*args, *kwargs.values()) if isinstance(value, str)]
    times = len(bounded(subject)) + 1 if isinstance(subject, str) else 0
    if name == "replace" and len(texts) > 1 and texts[0]:
        times = str(subject).count(texts[0])
    if name in ("replace", "translate", "indent", "wordwrap"):
        _refuse_many(name, times * max(map(len, texts), default=0))
    if name == "join":
        _refuse_many(name, sum(len(subject) * len(value) for value in args if isinstance(value, list | tuple)))
        bounded(list(args))


def _refuse_many(name: str, characters: int) -> None:
    if characters > MOST_CHARACTERS:
        raise TextError(f"{name}: makes more than {MOST_CHARACTERS} characters")
