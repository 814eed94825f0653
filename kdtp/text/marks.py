"""Marks in a template for the control tokens that its author wrote, so that nothing else can become one."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping

from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from kdtp.text.tokenizer import Part

# Methods and filters whose first arguments are looked for in a text, not written: there a name stays a name.
_SEARCHES = (
    *("split", "rsplit", "partition", "rpartition", "startswith", "endswith", "find", "rfind", "index", "rindex"),
    *("count", "strip", "lstrip", "rstrip", "trim", "removeprefix", "removesuffix", "replace"),
)
_SOUGHT = dict.fromkeys(_SEARCHES, 1) | dict.fromkeys(("select", "reject", "selectattr", "rejectattr"), 3)


class Marks:
    """Stand-ins for control tokens in rendered text: a secret of 128 random bits and the token's number.

    All digits, so that a template's filters (upper, trim, tojson) leave a mark as it is. A user's text can hold one
    only by guessing the secret, which no answer and no error shows.
    """

    def __init__(self, controls: Mapping[str, int]) -> None:
        self._controls = controls
        names = sorted(controls, key=len, reverse=True)  # of two names at one place the longer counts
        self._name = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._secret = f"{secrets.randbits(128):039d}"
        self._mark = re.compile(f"{self._secret}([0-9]{{10}})")

    def put(self, text: str) -> str:
        """The text with a mark for every name of a control token."""
        return self._name.sub(lambda found: f"{self._secret}{self._controls[found.group()]:010d}", text)

    def parts(self, text: str) -> list[Part]:
        """Rendered text cut at its marks: plain texts and control ids."""
        pieces = self._mark.split(text)  # text, number, text, number, …, text
        parts: list[Part] = [int(piece) if i % 2 else piece for i, piece in enumerate(pieces)]
        return [part for part in parts if part != ""]

    def show(self, text: str) -> str:
        """Text for a person: names again for marks."""
        names = {token: name for name, token in self._controls.items()}
        return self._mark.sub(lambda found: names[int(found.group(1))], text)


class Marker(NodeTransformer):
    """Puts marks into what a parsed template may write, and leaves alone what it compares its input with.

    Each loop also goes through the filter `paced` and each `~` through `concat`, which the environment must have.
    """

    def __init__(self, marks: Marks) -> None:
        self._marks = marks

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.TemplateData(self._marks.put(node.data), lineno=node.lineno)

    def visit_Const(self, node: nodes.Const) -> nodes.Node:
        return nodes.Const(self._marks.put(node.value), lineno=node.lineno) if isinstance(node.value, str) else node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        return node

    def visit_Test(self, node: nodes.Test) -> nodes.Node:
        return node

    def visit_Call(self, node: nodes.Call) -> nodes.Node:
        method = node.node.attr if isinstance(node.node, nodes.Getattr) else ""
        return self._visit_but(node, _SOUGHT.get(method, 0))

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
        return self._visit_but(node, _SOUGHT.get(node.name, 0))

    def _visit_but(self, node: nodes.Call | nodes.Filter, sought: int) -> nodes.Node:
        kept, node.args = node.args[:sought], node.args[sought:]
        self.generic_visit(node)
        node.args = kept + node.args
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "concat", [], [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "paced", [], [], None, None, lineno=node.lineno)
        return node
