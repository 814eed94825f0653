"""Grammars of a model's own tokens, compiled by llguidance (extra `grammar`)."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from kdtp.text.schemas import endless
from kdtp.types import Grammar

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Between the parts of JSON. Without a limit a model that is lost writes spaces for ever.
_MOST_KEPT = 64  # compiled grammars
_MOST_TEXT = 1 << 19  # characters of them; one may have half as many
_JSON = {"whitespace_pattern": r"[ \n\r\t]{0,40}"}


class LlMatcher:
    """As spec.grammar.Matcher."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int]) -> None:
        self.ends = ends
        self._matcher = matcher

    @property
    def error(self) -> str:
        """Why nothing is allowed any more: a limit of the grammar's cost was reached, or no text leads to an end."""
        return str(self._matcher.get_error()).partition("\n")[0] if self._matcher.is_error() else ""

    def mask(self) -> bytes:
        """Of the ids that may come next."""
        mask: bytes = self._matcher.compute_bitmask()
        return b"" if self._matcher.is_error() else mask

    def advance(self, token: int) -> None:
        """Go on by an allowed token."""
        self._matcher.consume_token(token)

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        if not self._matcher.is_error():
            self._matcher.rollback(count)


class Vocabulary:
    """What llguidance must know of a tokenizer: the bytes of each id, which ids are no text, how text is cut."""

    bos_token_id = None

    def __init__(self, folder: Path, vocab_size: int, ends: Collection[int]) -> None:
        from kdtp.text.tokenizer import load

        self._tokenizer = load(folder, vocab_size)
        self.ends = self._tokenizer.stop_ids.union(ends)
        if not self.ends:
            raise ValueError(f"grammar: neither the model nor {folder} names a token that ends a text")
        controls = {*self._tokenizer.controls.values(), *self.ends}
        self.eos_token_id = min(self.ends)
        # An id that stands for nothing would match anywhere, and for ever.
        silent = [i for i in range(vocab_size) if not self._tokenizer.token_bytes(i)]
        self.special_token_ids = sorted(controls.union(silent))
        self.tokens = [self._tokenizer.token_bytes(i) or b"<none>" for i in range(vocab_size)]

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode())


class Grammars:
    """Compiles the grammars of requests to one model, whose tokenizer is read when it is needed, or by `prepare`.

    Those that were compiled last are kept. May be called from several threads; other threads run meanwhile.

    model: its folder or its tokenizer's, or a file beside its tokenizer; ends: ids that end a text, beside the
    tokenizer's own. ValueError from `compile`, naming what is missing or wrong.
    """

    def __init__(self, model: str, vocab_size: int, ends: Collection[int]) -> None:
        self._folder = Path(model) if Path(model).is_dir() else Path(model).parent
        self._vocab_size, self._ends = vocab_size, frozenset(ends)
        self._tokens: LLTokenizer | None = None
        self._known: OrderedDict[Grammar, LLMatcher] = OrderedDict()  # at their beginnings
        self._lock = Lock()

    def prepare(self) -> None:
        """Read the tokenizer now: it takes seconds, and the first request with a grammar would hold up all others.

        For a thread of its own, while the model is loaded. What is missing is said by `compile`, if a grammar comes.
        """
        with suppress(ImportError, ValueError):
            import llguidance

            self._read(llguidance)

    def compile(self, grammar: Grammar) -> LlMatcher:
        """A grammar at its beginning."""
        with self._lock:
            known = self._known.pop(grammar, None)
        known = known or self._compile(grammar)
        with self._lock:
            self._known[grammar] = known
            while len(self._known) > _MOST_KEPT or sum(len(kept.text) for kept in self._known) > _MOST_TEXT:
                self._known.popitem(last=False)
            return LlMatcher(known.deep_copy(), self._ends)

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            import llguidance
        except ImportError:
            raise ValueError("grammar: needs the package llguidance; pip install 'kdtp[grammar]'") from None
        tokens = self._read(llguidance)
        try:
            text = self._text(llguidance, grammar)
        except ValueError as error:
            raise ValueError(f"grammar: {error}") from None
        matcher = llguidance.LLMatcher(tokens, text, log_level=0)
        if matcher.is_error():
            raise ValueError(f"grammar: {grammar.kind}: {matcher.get_error().strip()}")
        if grammar.kind == "json_schema" and (loop := endless(json.loads(grammar.text))):
            raise ValueError(f"grammar: json_schema: no value of it ever ends: {loop}")
        return matcher

    @staticmethod
    def _text(llguidance: Any, grammar: Grammar) -> str:
        if grammar.kind == "json_schema":
            return str(llguidance.LLMatcher.grammar_from_json_schema(grammar.text, overrides=_JSON))
        return str(llguidance.grammar_from(grammar.kind, grammar.text))

    def _read(self, llguidance: Any) -> LLTokenizer:
        with self._lock:
            if self._tokens is None:
                self._tokens = self._read_now(llguidance)
            return self._tokens

    def _read_now(self, llguidance: Any) -> LLTokenizer:
        from kdtp.text.files import TextError

        try:
            vocabulary = Vocabulary(self._folder, self._vocab_size, self._ends)
        except TextError as error:
            raise ValueError(f"grammar: {error}") from None
        self._ends = vocabulary.ends
        wrapper = llguidance.TokenizerWrapper(vocabulary)
        made: LLTokenizer = llguidance.LLTokenizer(wrapper, n_vocab=self._vocab_size, eos_token=sorted(self._ends))
        return made
