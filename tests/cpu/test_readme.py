"""The documents' code blocks run, and print what the documents say.

In README.md and docs/*.md a fence opened with ```bash run or ```python run is run, each on its own, with the root's
files at hand. A ```text output fence after it is its standard output: line by line, where … stands for anything within
a line, and a line of … alone for any number of lines. Other fences are text.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import ROOT

LONGEST = 100  # seconds a block may take
LEFT_OUT = (".git", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis")


@dataclass(frozen=True)
class Block:
    """A block to run; `output`: what it must print, None if the document does not say."""

    place: str
    language: str
    code: str
    output: str | None = None


def blocks(name: str, text: str) -> list[Block]:
    """The blocks to run of a document; ValueError for a fence whose mark is misspelt or stands alone."""
    found: list[Block] = []
    fences = list(re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    for i, fence in enumerate(fences):
        info, body = fence.group(1).strip(), fence.group(2)
        place = f"{name}:{text[: fence.start()].count(chr(10)) + 1}"
        before = fences[i - 1].group(1).strip() if i else ""
        if info in ("bash run", "python run"):
            found.append(Block(place, info.split()[0], body))
        elif info == "text output" and before in ("bash run", "python run"):
            last = found.pop()
            found.append(Block(last.place, last.language, last.code, body))
        elif " " in info:
            raise ValueError(f"{place}: ```{info}: want 'bash run', 'python run', or 'text output' right after one")
    return found


def pattern(expected: str) -> str:
    """The regular expression of an expected output."""
    lines = []
    for line in expected.splitlines():
        piece = "[^\n]*".join(re.escape(part) for part in line.rstrip().split("…"))
        lines.append("(?:[^\n]*\n)*" if line.strip() == "…" else f"{piece}\n")
    return "".join(lines)


def compare(expected: str, printed: str) -> str | None:
    """None if `printed` is as expected, else the two texts for a person to compare."""
    printed = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
    if re.fullmatch(pattern(expected), printed):
        return None
    for count in range(len(expected.splitlines()), -1, -1):
        head = "".join(expected.splitlines(keepends=True)[:count])
        if re.match(pattern(head), printed):
            break
    return f"the first {count} lines agree; expected:\n{expected}\nprinted:\n{printed}"


def run(block: Block, folder: Path) -> str:
    """Standard output of a block run in `folder`; AssertionError unless it ends well and in time."""
    command = ["bash", "-euo", "pipefail", "-c", block.code]
    if block.language == "python":
        (folder / "block.py").write_text(block.code)
        command = [sys.executable, "block.py"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PATH": path},
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=LONGEST)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{block.place}: not done after {LONGEST} s\n{out}\n{err}") from None
    assert process.returncode == 0, f"{block.place}: code {process.returncode}\n{out}\n{err}"
    assert "Warning" not in err and "Traceback" not in err, f"{block.place}: {err}"
    return out


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A folder with the root's entries as links: what a block writes beside them does not land in the checkout."""
    for path in ROOT.iterdir():
        if path.name not in LEFT_OUT:
            (tmp_path / path.name).symlink_to(path)
    return tmp_path


DOCUMENTS = [path for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))] if path.exists()]
BLOCKS = [block for path in DOCUMENTS for block in blocks(str(path.relative_to(ROOT)), path.read_text())]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_block_runs_and_prints_what_the_document_says(block: Block, workplace: Path) -> None:
    printed = run(block, workplace)
    difference = None if block.output is None else compare(block.output, printed)
    assert difference is None, f"{block.place}: {difference}"


SAMPLE = """
```bash run
echo one; echo two
```

It prints

```text output
o…e
two
```
```python run
print(1)
```
```bash
rm -rf /
```
```
plain
```
"""


def test_finds_blocks() -> None:
    first, second = blocks("x.md", SAMPLE)
    assert first == Block("x.md:2", "bash", "echo one; echo two\n", "o…e\ntwo\n")
    assert second == Block("x.md:12", "python", "print(1)\n")


@pytest.mark.parametrize("fence", ["bash runs", "text output", "python  run", "sh run"])
def test_refuses_misspelt_marks(fence: str) -> None:
    with pytest.raises(ValueError, match=r"x.md:1: "):
        blocks("x.md", f"```{fence}\n```\n")


@pytest.mark.parametrize(
    ("expected", "printed", "agree"),
    [
        ("a\nb\n", "a\nb\n", True),
        ("a\nb\n", "a  \nb", True),
        ("a\nb\n", "a\n", False),
        ("a\n", "a\nb\n", False),
        ("t = … ms\n", "t = 3.5 ms\n", True),
        ("t = … ms\n", "t = 3.5\n ms\n", False),
        ("a.c\n", "abc\n", False),
        ("a\n…\nd\n", "a\nb\nc\nd\n", True),
        ("a\n…\nd\n", "a\nd\n", True),
        ("a\n…\nd\n", "a\nb\nc\n", False),
        ("…\n", "", True),
    ],
)
def test_compares(expected: str, printed: str, agree: bool) -> None:
    assert (compare(expected, printed) is None) == agree


def test_says_where_output_parts() -> None:
    assert "the first 2 lines agree" in str(compare("a\n…b\nc\n", "a\nxb\nd\n"))


def test_runs_both_languages_apart_from_the_checkout(workplace: Path) -> None:
    bash = "ls tests/refs/model_tiny.kdtr; python -c 'import kdtp; print(kdtp.__version__)'; echo x > scratch"
    assert run(Block("x:1", "bash", bash), workplace).splitlines()[0] == "tests/refs/model_tiny.kdtr"
    assert (workplace / "scratch").exists() and not (ROOT / "scratch").exists()
    assert run(Block("x:1", "python", "import kdtp\nprint(kdtp.__name__)"), workplace) == "kdtp\n"
    assert not (ROOT / "block.py").exists()


@pytest.mark.parametrize("code", ["false; true", "false | true", "echo $undefined_name"])
def test_a_block_that_fails_is_seen(code: str, workplace: Path) -> None:
    with pytest.raises(AssertionError, match=r"x.md:7: code 1"):
        run(Block("x.md:7", "bash", code), workplace)
