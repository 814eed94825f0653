"""scripts/sizes.py counts lines as a reader would."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.sizes import Lines, measure, package

PYTHON = '''"""Module.

More.
"""

x = """not a
docstring"""  # why


def f():
    """One line."""
    # a comment
    return "# none"
'''
C = """/* one */
int a; /* behind */

/* two
   lines */ int b;
/* three

   lines */
char *c = "/* no comment"; char q = '"'; // behind
// alone
"""
BASH = """#!/usr/bin/env bash
# why
echo "#"

"""


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("a.py", PYTHON, Lines(1, 4, 5, 4)),
        ("a.h", C, Lines(1, 3, 5, 2)),
        ("a", BASH, Lines(1, 2, 1, 1)),
    ],
)
def test_counts(tmp_path: Path, name: str, text: str, counts: Lines) -> None:
    (tmp_path / name).write_text(text)
    assert measure(tmp_path / name) == counts


def test_leaves_out_what_is_no_source(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("text\n")
    assert measure(tmp_path / "a.md") is None


def test_packages() -> None:
    names = ["kdtp/types.py", "kdtp/model/weights/kdtr.py", "tests/cpu/test_x.py", "launcher/group.py", "a.py"]
    assert [package(Path(name)) for name in names] == ["kdtp", "kdtp/model", "tests/cpu", "launcher", ""]
