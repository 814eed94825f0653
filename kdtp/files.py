"""Files of a model folder. Those we are given may be anything: read whole, but never more than they may have, JSON
without twins. Those we write are there whole or not at all."""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


def read(path: Path, most: int) -> bytes:
    """All of a regular file of at most `most` bytes. OSError whose strerror says why it cannot be.

    A pipe is not waited for, and a device without an end is not begun.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(None, "is a directory")
        if not stat.S_ISREG(status.st_mode):
            raise OSError(None, "want a regular file, found a device or pipe")
        if status.st_size > most:
            raise OSError(None, f"{status.st_size} bytes: must be at most {most}")
        return file.read(most)


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, for json.loads: ValueError for a name that is there twice, where json would take the last."""
    found = dict(pairs)
    if len(found) != len(pairs):
        twin, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"two entries named {twin!r}")
    return found


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let OSError name the file: that of a write, on a full disk, names none."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes the place of `path` at once, when all that was written is on the disk.

    Until then, and if writing fails (OSError names the file), what was there stays; a kill leaves PATH.part behind.
    """
    part = path.with_name(f"{path.name}.part")
    with naming(path):
        try:
            with part.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def write(path: Path, text: str) -> None:
    """Write a text, as of `replacing`."""
    with replacing(path) as file:
        file.write(text.encode())
