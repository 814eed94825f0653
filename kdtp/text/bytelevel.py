"""`tokenizer.json` with byte-level BPE, as DeepSeek ships it: cut and encoded by the tokenizers library."""

from __future__ import annotations

import json
import os
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import tokenizers

from kdtp.text.files import TextError, read_json


@dataclass(frozen=True)
class Added:
    """An entry of the file's added_tokens. lstrip, rstrip: it swallows the spaces before or after it."""

    id: int
    content: str
    special: bool
    lstrip: bool
    rstrip: bool

    @property
    def is_control(self) -> bool:
        """Whether it is no text. The flag says less than that (DeepSeek's turns are not "special"), so all count but
        single characters and runs of spaces, which some vocabularies add as text."""
        return self.special or (len(self.content) > 1 and not self.content.isspace())


class ByteLevelCodec:
    """As `Codec`. The library gets a file without the control tokens, so it can make none of plain text."""

    sorts_tools = False
    template_defaults: Mapping[str, Any] = {}

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path
        file = read_json(path)
        model = _model(file, path)
        vocab: dict[str, int] = model["vocab"]
        added = list(_added(file, vocab, path))
        controls = {token.content: token for token in added if token.is_control}
        self._by_id = {token.id: token for token in controls.values()}
        self.controls = {name: token.id for name, token in controls.items()}
        self.hidden = frozenset(token.id for token in added if token.special)
        self.size = 1 + max(*vocab.values(), *(token.id for token in added))
        self.begin = tuple(_begin(file, self.controls, path))
        self._bytes = {i: _bytes(name) for name, i in [*vocab.items(), *((t.content, t.id) for t in added)]}
        self._bpe = _plain(file, model, added, path)

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """Ids of plain texts and control ids."""
        ids: list[int] = []
        for i, part in enumerate(parts):
            if isinstance(part, int):
                ids.append(part)
                continue
            before, after = (self._by_id.get(_at(parts, k)) for k in (i - 1, i + 1))
            text = part.lstrip() if before and before.rstrip else part
            text = text.rstrip() if after and after.lstrip else text
            ids += self._encode(text)
        return ids

    def _encode(self, text: str) -> list[int]:
        try:
            # Unlike `encode`, which takes seconds for a long text, this lets other threads run.
            found: list[int] = self._bpe.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except BaseException as error:
            # Where a file's regular expression does not come to an end the library panics, with no Exception.
            if type(error).__name__ != "PanicException":
                raise
            raise TextError(f"{self._path}: {error}") from None
        return found

    def token_bytes(self, token: int) -> bytes:
        """As of `Tokenizer`."""
        return self._bytes.get(token, b"")


def _at(parts: Sequence[str | int], i: int) -> int:
    part = parts[i] if 0 <= i < len(parts) else -1
    return part if isinstance(part, int) else -1


def _model(file: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The file's model, checked to be one whose tokens are bytes."""
    model = file.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        kind = model.get("type") if isinstance(model, dict) else model
        raise TextError(f"{path}: model.type = {reprlib.repr(kind)}: must be BPE")
    if not model.get("vocab") or not isinstance(model["vocab"], dict) or not isinstance(model.get("merges"), list):
        raise TextError(f"{path}: model: must have a vocab object and a list of merges")
    for number, merge in enumerate(model["merges"]):
        if not _is_pair(merge.split(" ") if isinstance(merge, str) else merge):
            raise TextError(f"{path}: model.merges[{number}] = {reprlib.repr(merge)}: must be two tokens")
    decoder = file.get("decoder")
    kind = decoder.get("type") if isinstance(decoder, dict) else decoder
    if kind != "ByteLevel":
        raise TextError(f"{path}: decoder = {reprlib.repr(kind)}: must be ByteLevel")
    holders: dict[int, str] = {}
    for name, token in model["vocab"].items():
        if type(token) is not int or not 0 <= token < 1 << 31:
            raise TextError(f"{path}: model.vocab[{name!r}] = {reprlib.repr(token)}: must be a token id")
        if holders.setdefault(token, name) != name:
            raise TextError(f"{path}: model.vocab: {name!r} and {holders[token]!r} both have id {token}")
    return model


def _added(file: Mapping[str, Any], vocab: Mapping[str, int], path: Path) -> Iterator[Added]:
    entries = file.get("added_tokens") or []
    if not isinstance(entries, list):
        raise TextError(f"{path}: added_tokens = {reprlib.repr(entries)}: must be a list")
    names = {token: name for name, token in vocab.items()}
    seen: dict[str, int] = {}
    for number, entry in enumerate(entries):
        where = f"{path}: added_tokens[{number}]"
        token, name = (entry.get(key) if isinstance(entry, dict) else None for key in ("id", "content"))
        if type(token) is not int or not 0 <= token < 1 << 31 or not isinstance(name, str) or not name:
            raise TextError(f"{where} = {reprlib.repr(entry)}: must have an id and its content")
        if entry.get("single_word"):
            raise TextError(f"{where}: {name!r}: single_word is not supported")
        other = names.setdefault(token, name)
        if other != name:
            raise TextError(f"{where}: {name!r} has id {token}, which is {other!r}")
        if seen.setdefault(name, token) != token or vocab.get(name, token) != token:
            raise TextError(
                f"{where}: {name!r} has id {token} and id {seen[name] if seen[name] != token else vocab[name]}"
            )
        yield Added(token, name, bool(entry.get("special")), bool(entry.get("lstrip")), bool(entry.get("rstrip")))


def _plain(
    file: Mapping[str, Any], model: Mapping[str, Any], added: Sequence[Added], path: Path
) -> tokenizers.Tokenizer:
    """The library's tokenizer of plain text. Control tokens are taken out, also where the vocabulary lists them."""
    gone = {token.content for token in added if token.is_control}
    vocab = {name: token for name, token in model["vocab"].items() if name not in gone}
    merges = model["merges"]
    if len(vocab) < len(model["vocab"]):
        merges = [m for m in merges if gone.isdisjoint(_merged(m))]
    # The library numbers added tokens anew, unless the vocabulary has them.
    texts = [token for token in added if not token.is_control]
    vocab |= {token.content: token.id for token in texts}
    kept = [entry for entry in file.get("added_tokens") or [] if entry["content"] not in gone]
    changed = {"added_tokens": kept, "post_processor": None, "truncation": None, "padding": None}
    plain = {**file, **changed, "model": {**model, "vocab": vocab, "merges": merges}}
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # no threads of its own, and no word of them after a fork
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises nothing narrower
        raise TextError(f"{path}: {error}") from None


def _is_pair(merge: object) -> bool:
    return isinstance(merge, list) and len(merge) == 2 and all(isinstance(part, str) for part in merge)


def _merged(merge: str | list[str]) -> tuple[str, str, str]:
    """The two parts of a merge, which old files give as "a b", and what they become."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right, left + right


def _begin(file: Mapping[str, Any], controls: Mapping[str, int], path: Path) -> Iterator[int]:
    """Ids that the post-processor puts before a text."""
    processor = file.get("post_processor") or {}
    try:
        steps = processor.get("processors", [processor])
        items = [item.get("SpecialToken", {}).get("id") for step in steps for item in step.get("single", [])]
    except (AttributeError, TypeError):
        raise TextError(f"{path}: post_processor = {reprlib.repr(processor)}: is none that is known") from None
    for name in takewhile(lambda name: name is not None, items):
        if not isinstance(name, str) or name not in controls:
            raise TextError(f"{path}: post_processor: {name!r} is no added token")
        yield controls[name]


def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level vocabularies (GPT-2's): printable Latin-1 stands for itself, the other bytes for the
    characters from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE = _byte_of_character()


def _bytes(name: str) -> bytes:
    """The bytes of a vocabulary entry; one with a character outside of the alphabet (an added token) is as written."""
    try:
        return bytes(_BYTE[character] for character in name)
    except KeyError:
        return name.encode()
