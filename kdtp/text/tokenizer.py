"""`load` gives the Tokenizer of a model folder, whatever files the folder has."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from kdtp.text import bytelevel, kimi
from kdtp.text.files import TextError, check_unicode, end_ids, read_json, role_names

Part = str | int  # a piece of plain text, or the id of a control token


class Codec(Protocol):
    """A vocabulary and how text is cut into it.

    size: one more than the highest id. controls: name -> id of the tokens that are no text; no text encodes to one.
    hidden: those of them that are not shown. begin: ids that a text to be continued starts with, if
    tokenizer_config.json does not say. sorts_tools: the keys of tools are sorted before a chat template sees them;
    template_defaults: the template's variables where a caller does not set them.
    """

    sorts_tools: bool
    template_defaults: Mapping[str, Any]
    size: int
    controls: dict[str, int]
    hidden: frozenset[int]
    begin: tuple[int, ...]

    def encode(self, parts: Sequence[Part]) -> list[int]: ...
    def token_bytes(self, token: int) -> bytes: ...


CODECS: dict[str, Callable[[Path, Mapping[str, Any]], Codec]] = {
    "tiktoken.model": kimi.KimiCodec,
    "tokenizer.json": bytelevel.ByteLevelCodec,
}


def load(folder: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """The tokenizer of a model folder as published.

    vocab_size: of the model that goes with it; the tokenizer must not have more. TextError if the folder has no
    tokenizer file that we read, or a broken one. No code of the folder is run, and nothing is cached.
    """
    folder = Path(folder)
    settings = read_json(folder / "tokenizer_config.json")
    for name, codec in CODECS.items():
        if os.path.lexists(folder / name):
            return Tokenizer(folder, codec(folder / name, settings), settings, vocab_size)
    looked = " or ".join(CODECS)
    if (folder / "tokenizer.model").is_file():
        raise TextError(f"{folder}: has a sentencepiece tokenizer.model, which is not read; must have {looked}")
    raise TextError(f"{folder}: no tokenizer; looked for {looked}")


class Tokenizer:
    """Text to token ids and back.

    vocab_size: one more than the highest id. controls: name -> id of the tokens that stand for no text (turns, tools,
    thinking); `encode` never gives one, so that no text can forge them. hidden: those not shown when decoding.
    stop_ids: what ends an answer, by generation_config.json, config.json and the tokenizer's own eos. roles: names of
    special tokens ("bos_token"). begin: ids that a text to be continued starts with. Raises TextError.
    """

    def __init__(self, folder: Path, codec: Codec, settings: Mapping[str, Any], vocab_size: int | None = None) -> None:
        self.folder = folder
        self.settings = settings
        self.vocab_size = codec.size
        self.controls = codec.controls
        self.hidden = codec.hidden
        self.sorts_tools = codec.sorts_tools
        self.template_defaults = codec.template_defaults
        self._codec = codec
        where = folder / "tokenizer_config.json"
        self.roles = role_names(settings, where)
        if vocab_size is not None and self.vocab_size > vocab_size:
            raise TextError(f"{folder}: the tokenizer has {self.vocab_size} tokens, the model only {vocab_size}")
        self.stop_ids = self._ends(vocab_size or self.vocab_size)
        self.begin = self._begin(where)
        names = sorted(self.controls, key=len, reverse=True)  # of two names at one place the longer counts
        self._control = re.compile("|".join(map(re.escape, names)) or r"(?!)")

    def _ends(self, vocab_size: int) -> frozenset[int]:
        ends = end_ids(self.folder)
        for token, where in ends.items():
            if token >= vocab_size:
                raise TextError(f"{where} = {token}: must be below {vocab_size}, the size of the vocabulary")
        own = self.roles.get("eos_token")
        return frozenset(ends) | ({self._id(own, "eos_token")} if own else set())

    def _begin(self, where: Path) -> tuple[int, ...]:
        wanted = self.settings.get("add_bos_token")
        if wanted is None:
            return self._codec.begin
        if not wanted:
            return ()
        if "bos_token" not in self.roles:
            raise TextError(f"{where}: add_bos_token is set, but there is no bos_token")
        return (self._id(self.roles["bos_token"], "bos_token"),)

    def _id(self, name: str, role: str) -> int:
        if name not in self.controls:
            raise TextError(
                f"{self.folder / 'tokenizer_config.json'}: {role} = {name!r}: the tokenizer has no such token"
            )
        return self.controls[name]

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: names of control tokens in it are text like any other."""
        return self.encode_parts([text])

    def encode_parts(self, parts: Sequence[Part]) -> list[int]:
        """Token ids of plain texts and control ids in turn, as `ChatTemplate.render` and `split` give them.

        Texts side by side are one text. TextError for text that is no Unicode (half a surrogate pair).
        """
        joined: list[Part] = []
        for part in parts:
            if isinstance(part, str) and joined and isinstance(joined[-1], str):
                joined[-1] += part
            elif part != "":
                joined.append(part)
        for part in joined:
            if isinstance(part, str):
                check_unicode(part, "text")
        return self._codec.encode(joined)

    def split(self, text: str) -> list[Part]:
        """Text that may hold control tokens, cut at their names. Never for text of a user: it could then forge them."""
        parts: list[Part] = []
        end = 0
        for found in self._control.finditer(text):
            parts += [text[end : found.start()], self.controls[found.group()]]
            end = found.end()
        return [part for part in [*parts, text[end:]] if part != ""]

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for, which may be part of a character; a control token's are its name.

        An id that has no token, such as the padding at the end of a model's vocabulary, stands for nothing.
        """
        return self._codec.token_bytes(token)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids, without the hidden ones; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.token_bytes(i) for i in ids if i not in self.hidden).decode("utf-8", "replace")
