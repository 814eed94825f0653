"""One logger for all processes: a line says when, which role and process, and what."""

from __future__ import annotations

import logging
import os
import sys

LEVELS = ("debug", "info", "warning", "error")
logger = logging.getLogger("kdtp")


class _Escaping(logging.Formatter):
    """Control characters of a message are escaped, so that text from outside cannot forge a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.message)
        return super().formatMessage(record)


def setup(role: str, level: str = "info") -> None:
    """Send the log to stderr with `role` in every line, e.g. "worker tp=1"."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Escaping(f"%(asctime)s %(levelname).1s ({role} pid={os.getpid()}) %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def amount(nbytes: float) -> str:
    """Bytes as people read them, in powers of 1000: "595.12 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} bytes"
