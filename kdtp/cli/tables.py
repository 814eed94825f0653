"""Plain text for people: aligned columns, and text of files made harmless."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def printable(text: str) -> str:
    """Control characters escaped: a file's text must not move the cursor or forge a line."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def table(title: str, rows: Sequence[tuple[str, ...]], align: str) -> Iterable[str]:
    """Rows in columns as wide as their widest cell; `align`: "<" or ">" for each column."""
    yield f"\n{title}"
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, align, widths, strict=True)
        yield "  " + "  ".join(f"{cell:{side}{width}}" for cell, side, width in cells).rstrip()
