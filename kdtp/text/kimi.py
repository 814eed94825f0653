"""Kimi's and Moonlight's tokenizer: `tiktoken.model`, read without the Python file that is published beside it."""

from __future__ import annotations

import base64
import binascii
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tiktoken

from kdtp.text.files import TextError, read_bytes

CLASS = "TikTokenTokenizer"  # tokenizer_class of the published tokenizer_config.json
SPECIALS = 256  # ids after the ranks; a constant of the format

# How text is cut before the ranks are applied (the published pat_str, fancy-regex syntax): Chinese characters stay
# among themselves, words take a leading sign or space and an English ending, digits go in threes.
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        _HEAD + _UPPER + "*" + _LOWER + "+" + _ENDING,
        _HEAD + _UPPER + "+" + _LOWER + "*" + _ENDING,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
# The published class encodes longer texts, and longer runs of spaces or of anything else, in pieces.
LONGEST_PIECE = 400_000
LONGEST_RUN = 25_000
_RUN = re.compile(r"\s+|\S+")


class KimiCodec:
    """As `Codec`. The ranks of the file, then 256 control tokens, named by tokenizer_config.json or reserved."""

    # As the published class does it, before the chat template sees anything.
    sorts_tools = True
    template_defaults: Mapping[str, Any] = {"thinking": True, "preserve_thinking": False}

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        kind = settings.get("tokenizer_class", CLASS)
        if kind != CLASS:
            raise TextError(f"{path}: tokenizer_class is {kind!r}; only {CLASS} is read from such a file")
        ranks = read_ranks(path)
        self.controls, self.hidden = _controls(len(ranks), settings, path.with_name("tokenizer_config.json"))
        self.size = len(ranks) + SPECIALS
        self.begin: tuple[int, ...] = ()
        self._names = {token: name for name, token in self.controls.items()}
        self._bytes = [*ranks, *(name.encode() for name in self.controls)]
        self._bpe = tiktoken.Encoding("kimi", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})

    def encode(self, parts: Sequence[str | int]) -> list[int]:
        """Ids of plain texts and control ids. The cuts are counted over all of it, control tokens by their names."""
        whole = "".join(part if isinstance(part, str) else self._names[part] for part in parts)
        ends = [*cuts(whole), len(whole)]
        ids: list[int] = []
        at = next_end = 0
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
                at += len(self._names[part])
                continue
            stop = at + len(part)
            while at < stop:
                while ends[next_end] <= at:
                    next_end += 1
                upto = min(stop, ends[next_end])
                ids += self._bpe.encode_ordinary(whole[at:upto])
                at = upto
        return ids

    def token_bytes(self, token: int) -> bytes:
        """As of `Tokenizer`."""
        return self._bytes[token] if token < self.size else b""


def cuts(text: str) -> Iterator[int]:
    """Where a text is cut into pieces that are encoded one by one; nearly always nowhere."""
    for start in range(0, len(text), LONGEST_PIECE):
        if start:
            yield start
        for run in _RUN.finditer(text, start, start + LONGEST_PIECE):
            yield from range(run.start() + LONGEST_RUN, run.end(), LONGEST_RUN)


def read_ranks(path: Path) -> dict[bytes, int]:
    """Bytes -> rank of a tiktoken.model file: a line each, base64, a space, the rank. In order of rank.

    TextError naming the line for one that is not that, for a rank or token that came before, and for a file whose
    ranks are not 0, 1, 2 … or that lacks one of the 256 bytes, since some text could then not be encoded.
    """
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if not line:
            continue
        token, rank = _entry(line, f"{path}: line {number}")
        if rank in lines or token in ranks:
            what = f"rank {rank}" if rank in lines else f"token {token!r}"
            raise TextError(
                f"{path}: line {number}: {what} is also in line {lines[rank if rank in lines else ranks[token]]}"
            )
        ranks[token], lines[rank] = rank, number
    gap = next((rank for rank in range(len(lines)) if rank not in lines), None)
    if gap is not None:
        raise TextError(f"{path}: {len(lines)} tokens, but none of rank {gap}")
    absent = next((byte for byte in range(256) if bytes([byte]) not in ranks), None)
    if absent is not None:
        raise TextError(f"{path}: no token for the byte 0x{absent:02x}")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _entry(line: bytes, where: str) -> tuple[bytes, int]:
    code, _, rank = line.partition(b" ")
    try:
        token = base64.b64decode(code, validate=True)
    except binascii.Error as error:
        raise TextError(f"{where}: {reprlib.repr(line)}: base64: {error}") from None
    if not token or not rank.isdigit() or len(rank) > 9:
        raise TextError(f"{where}: {reprlib.repr(line)}: must be base64 of a token, a space and its rank")
    return token, int(rank)


def _controls(first: int, settings: Mapping[str, Any], path: Path) -> tuple[dict[str, int], frozenset[int]]:
    """Names of the control tokens in order of id, and which are hidden: all but those said to be not special."""
    given = settings.get("added_tokens_decoder", {})
    if not isinstance(given, dict):
        raise TextError(f"{path}: added_tokens_decoder: must be an object, is {reprlib.repr(given)}")
    names, shown = {}, set()
    for key, value in given.items():
        name = value.get("content") if isinstance(value, dict) else None
        where = f"{path}: added_tokens_decoder[{key!r}]"
        if not isinstance(name, str) or not name:
            raise TextError(f"{where} = {reprlib.repr(value)}: must be an object with the token's name as content")
        if not key.isdecimal() or len(key) > 9 or not first <= int(key) < first + SPECIALS:
            raise TextError(f"{where}: must be an id of {first}..{first + SPECIALS - 1}, those after the ranks")
        names[int(key)] = name
        if value.get("special") is False:
            shown.add(int(key))
    ids = range(first, first + SPECIALS)
    controls: dict[str, int] = {}
    for token in ids:
        name = names.get(token, f"<|reserved_token_{token}|>")
        if name in controls:
            raise TextError(f"{path}: {name!r} names both token {controls[name]} and token {token}")
        controls[name] = token
    return controls, frozenset(ids) - shown
