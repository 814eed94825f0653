"""One logger for all processes: a line says when, which role and process, and what; as text, or as a JSON object."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys

LEVELS = ("debug", "info", "warning", "error")
FORMS = ("text", "json")
logger = logging.getLogger("kdtp")


class _Escaping(logging.Formatter):
    """Control characters of a message are escaped, so that text from outside cannot forge a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = "".join(c if c.isprintable() else repr(c)[1:-1] for c in record.message)
        return super().formatMessage(record)


class _Json(logging.Formatter):
    """time: seconds since 1970; level, role, pid, message; error: a traceback, where there is one."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        fields = {"time": round(record.created, 3), "level": record.levelname.lower(), "role": self._role}
        fields |= {"pid": os.getpid(), "message": record.getMessage()}
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add how much is logged, and how."""
    parser.add_argument("--log-level", default="info", choices=LEVELS)
    parser.add_argument("--log-format", default="text", choices=FORMS, help="json: an object a line (default text)")


def setup(role: str, level: str = "info", form: str = "text") -> None:
    """Send the log to stderr with `role` in every line, e.g. "worker tp=1"."""
    handler = logging.StreamHandler(sys.stderr)
    text = _Escaping(f"%(asctime)s %(levelname).1s ({role} pid={os.getpid()}) %(message)s")
    handler.setFormatter(_Json(role) if form == "json" else text)
    logger.handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def form() -> str:
    """How this process logs, for one that it starts."""
    return "json" if any(isinstance(handler.formatter, _Json) for handler in logger.handlers) else "text"


def amount(nbytes: float) -> str:
    """Bytes as people read them, in powers of 1000: "595.12 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes:.0f} bytes"
