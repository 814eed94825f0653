"""Print lines per package: code, comment (docstrings too) and blank.

    python scripts/sizes.py

Counts the files that git knows, so that build products and scratch files do not show.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
C_SUFFIXES = (".c", ".h", ".cu", ".cuh", ".cpp")


@dataclass
class Lines:
    """Counts of one package."""

    files: int = 0
    code: int = 0
    comment: int = 0
    blank: int = 0

    def add(self, other: Lines) -> None:
        """Count `other` too."""
        self.files += other.files
        self.code += other.code
        self.comment += other.comment
        self.blank += other.blank


def count(text: str, comments: set[int]) -> Lines:
    """Counts of one file; `comments`: numbers, from 1, of the lines that are nothing but comment."""
    lines = Lines(files=1)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            lines.blank += 1
        elif number in comments:
            lines.comment += 1
        else:
            lines.code += 1
    return lines


def python_comments(text: str) -> set[int]:
    """Lines of docstrings, and lines that begin with #."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            found.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            found.add(token.start[0])
    return found


def c_comments(text: str) -> set[int]:
    """Lines that hold nothing but comment; strings are skipped, so that "//" in one is no comment."""
    kept = re.sub(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|//[^\n]*|/\*.*?\*/', _hollow, text, flags=re.DOTALL)
    pairs = zip(text.splitlines(), kept.splitlines(), strict=True)
    return {number for number, (line, rest) in enumerate(pairs, 1) if line.strip() and not rest.strip()}


def _hollow(match: re.Match[str]) -> str:
    piece = match.group()
    return piece if piece[0] in "'\"" else "\n" * piece.count("\n")


def bash_comments(text: str) -> set[int]:
    """Lines that begin with #, but for the first, which names the interpreter."""
    return {n for n, line in enumerate(text.splitlines(), 1) if n > 1 and line.lstrip().startswith("#")}


def measure(path: Path) -> Lines | None:
    """Counts of a source file; None for anything else."""
    text = path.read_bytes().decode("utf-8", "replace")
    if path.suffix == ".py":
        return count(text, python_comments(text))
    if path.suffix in C_SUFFIXES:
        return count(text, c_comments(text))
    return count(text, bash_comments(text)) if text.startswith("#!") else None


def package(path: Path) -> str:
    """The package a file counts for: two folders deep in kdtp, tests and csrc, else the first."""
    folders = path.parts[:-1]
    deep = folders[:1] in (("kdtp",), ("tests",), ("csrc",))
    return "/".join(folders[: 2 if deep else 1])


def main() -> int:
    """Print the table."""
    known = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    packages: defaultdict[str, Lines] = defaultdict(Lines)
    for name in filter(None, known.split("\0")):
        path = Path(name)
        if (ROOT / path).is_file() and (lines := measure(ROOT / path)):
            packages[package(path)].add(lines)
            packages["all"].add(lines)
    print(f"{'package':<20} {'files':>6} {'code':>7} {'comment':>8} {'blank':>7}")
    for name, lines in sorted(packages.items(), key=lambda item: (item[0] == "all", item[0])):
        print(f"{name or '.':<20} {lines.files:>6} {lines.code:>7} {lines.comment:>8} {lines.blank:>7}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
