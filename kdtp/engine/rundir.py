"""The private folder of one running engine: its sockets and its lock. Only what an engine made is ever deleted."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

SETTINGS = "engine.json"  # of the engine, where the Python API started it
SCRATCH = "scratch"  # for the launcher
_LOCK = "lock"
_MADE = ("rpc.ipc", "rank-*.ipc", "rank-*.lane", SETTINGS, _LOCK)
_PREFIX = "kdtp-"
_MAX_SOCKET_PATH = 107  # sun_path of Linux, without the closing zero
_LONGEST_NAME = "rank-0000.lane"


def create(settings: str | None = None) -> Path:
    """A new folder, mode 0700, under $XDG_RUNTIME_DIR or the temporary folder; settings: go into SETTINGS.

    ValueError if it cannot be made there; nothing is left then.
    """
    base = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    if not os.access(base, os.W_OK):
        base = Path(tempfile.gettempdir())
    _sweep(base)
    path = None
    try:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        (path / _LOCK).touch(0o600)  # also the mark by which a later sweep knows the folder
        if settings is not None:
            (path / SETTINGS).write_text(settings)
        return check(path)
    except (OSError, ValueError) as error:
        if path is not None:
            remove(path)
        why = f"run folder in {base}: {error.strerror}" if isinstance(error, OSError) else error
        raise ValueError(f"{why} (XDG_RUNTIME_DIR or TMPDIR says where it is made)") from None


def check(path: Path) -> Path:
    """`path`, if sockets in it are safe and possible; else ValueError saying why not."""
    if not path.is_dir():
        raise ValueError(f"run folder {path}: not a folder")
    info = path.stat()
    if info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ValueError(f"run folder {path}: must be yours alone (chmod 700), has mode {info.st_mode & 0o777:o}")
    if len(os.fsencode(path / _LONGEST_NAME)) > _MAX_SOCKET_PATH:
        raise ValueError(f"run folder {path}: a socket's path may have {_MAX_SOCKET_PATH} bytes; use a shorter one")
    return path


def lock(path: Path) -> int:
    """Hold the folder for this process: a file descriptor to keep open. ValueError if it cannot, as another does."""
    try:
        return _hold(path, os.O_CREAT)
    except OSError as error:
        raise ValueError(f"run folder {path}: {_LOCK}: {error.strerror}") from None


def _hold(path: Path, flags: int) -> int:
    held = os.open(path / _LOCK, flags | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ValueError(f"run folder {path}: another engine runs in it") from None
    return held


def endpoint(path: Path, name: str) -> str:
    """ZeroMQ address of socket `name` ("rpc", "rank-3") in the folder."""
    return f"ipc://{path / name}.ipc"


def lane(path: Path, rank: int) -> Path:
    """Where the coordinator listens for that rank's lane."""
    return path / f"rank-{rank}.lane"


def clean(path: Path) -> None:
    """Delete what an engine made in the folder, and nothing else."""
    for made in (found for pattern in _MADE for found in path.glob(pattern) if not found.is_dir()):
        made.unlink(missing_ok=True)
    shutil.rmtree(path / SCRATCH, ignore_errors=True)


def remove(path: Path) -> None:
    """`clean` a folder that `create` made, and delete it unless it holds something else."""
    clean(path)
    with contextlib.suppress(OSError):
        path.rmdir()


def _sweep(base: Path) -> None:
    # Folders whose engine was killed with -9: nobody holds their lock. Young ones may not have locked yet.
    for path in base.glob(_PREFIX + "*"):
        try:
            if path.stat().st_uid != os.getuid() or time.time() - path.stat().st_mtime < 3600:
                continue
            held = _hold(path, 0)  # without a lock file it is not a folder of ours
        except (OSError, ValueError):
            continue
        remove(path)
        os.close(held)
