"""The text to train on: the source of Python's standard library, split by module into train and held-out."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kdtp.config import ConfigError
from kdtp.text.tokenizer import Tokenizer

_OTHERS = {"site-packages", "dist-packages", "__pycache__", "pydoc_data"}
_HELD_OUT = 7  # of 100 modules
_SALT = 328  # with which that is 7 % of the text, too: of the modules, and of their tests
_LEAST = 1000  # characters of either part


@dataclass(frozen=True)
class Document:
    """A file: the module that decides on which side it is, its name under the root, its text."""

    module: str
    name: str
    text: str

    @property
    def is_held_out(self) -> bool:
        """The same for all Python versions."""
        return int(hashlib.sha256(f"{_SALT}:{self.module}".encode()).hexdigest(), 16) % 100 < _HELD_OUT


@dataclass(frozen=True)
class Corpus:
    """Documents in order of their names. ConfigError unless there is some of both kinds."""

    root: Path
    documents: tuple[Document, ...]

    @property
    def train(self) -> list[Document]:
        """What is trained on."""
        return [document for document in self.documents if not document.is_held_out]

    @property
    def held_out(self) -> list[Document]:
        """What the network never sees."""
        return [document for document in self.documents if document.is_held_out]


def read(root: Path | None = None) -> Corpus:
    """The *.py files below `root`; None: those of the running interpreter's standard library, its tests included."""
    root = root or Path(sysconfig.get_path("stdlib"))
    if not root.is_dir():
        raise ConfigError(f"{root}: must be a folder, of Python source")
    corpus = Corpus(root, tuple(_documents(root)))
    held_out, modules = (len({document.module for document in part}) for part in (corpus.held_out, corpus.documents))
    for part, documents in (("train on", corpus.train), ("hold out", corpus.held_out)):
        size = sum(len(document.text) for document in documents)
        if size < _LEAST:
            raise ConfigError(
                f"{root}: {size} characters of Python source to {part}: must be at least {_LEAST}; {held_out} of"
                f" {modules} modules are held out, by a hash of their names"
            )
    return corpus


def _documents(root: Path) -> Iterator[Document]:
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _OTHERS.isdisjoint(parts) and (text := _text(path)):
            yield Document(_module(parts), "/".join(parts), text)


def _module(parts: tuple[str, ...]) -> str:
    """The top-level module that a file belongs to; a module's test goes where the module goes."""
    tests = parts[0] in ("test", "tests") and len(parts) > 1
    return parts[tests].removesuffix(".py").removeprefix("test_")


def _text(path: Path) -> str:
    """Empty for what is no program text: other encodings, tables of numbers, files that hold almost nothing."""
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return ""
    text = text.replace("\r\n", "\n")
    digits = sum(map(text.count, "0123456789"))
    plain = text.isascii() or sum(c > "\x7f" for c in text) < 0.02 * len(text)
    return text if len(text) >= 100 and digits < 0.1 * len(text) and plain else ""


def encode(documents: list[Document], tokenizer: Tokenizer) -> NDArray[np.uint16]:
    """All of them in a row, each between the tokens for begin and end."""
    begin, end = (tokenizer.controls[tokenizer.roles[role]] for role in ("bos_token", "eos_token"))
    ids = [np.array([begin, *tokenizer.encode(each.text), end], np.uint16) for each in documents]
    return np.concatenate(ids)
