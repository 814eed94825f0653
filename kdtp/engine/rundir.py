"""The private folder of one running engine: its sockets and its lock."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "kdtp-"
_MAX_SOCKET_PATH = 107  # sun_path of Linux, without the closing zero
_LONGEST_NAME = "rank-0000.ipc"


def create() -> Path:
    """A new folder, mode 0700, under $XDG_RUNTIME_DIR or the temporary folder."""
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    _sweep(base)
    return check(Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base)))


def check(path: Path) -> Path:
    """`path`, if sockets in it are safe and possible; else ValueError saying why not."""
    if not path.is_dir():
        raise ValueError(f"run folder {path}: not a folder")
    info = path.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ValueError(f"run folder {path}: must be yours alone (chmod 700), has mode {info.st_mode & 0o777:o}")
    if len(str(path / _LONGEST_NAME)) > _MAX_SOCKET_PATH:
        raise ValueError(
            f"run folder {path}: a socket's path may have {_MAX_SOCKET_PATH} characters; use a shorter one"
        )
    return path


def lock(path: Path) -> int:
    """Hold the folder for this process: a file descriptor to keep open. ValueError if another engine runs in it."""
    held = os.open(path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ValueError(f"run folder {path}: another engine runs in it") from None
    return held


def endpoint(path: Path, name: str) -> str:
    """ZeroMQ address of socket `name` ("rpc", "rank-3") in the folder."""
    return f"ipc://{path / name}.ipc"


def remove(path: Path) -> None:
    """Delete the folder and what is in it."""
    shutil.rmtree(path, ignore_errors=True)


def _sweep(base: Path) -> None:
    # Folders whose engine was killed with -9: nobody holds their lock. Young ones may not have locked yet.
    for path in base.glob(_PREFIX + "*"):
        try:
            if path.stat().st_uid != os.getuid() or time.time() - path.stat().st_mtime < 3600:
                continue
            os.close(lock(path))
        except (OSError, ValueError):
            continue
        remove(path)
