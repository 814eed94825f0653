"""docs/serving.md names tests that there are."""

import re

from tests.conftest import ROOT

CPU = ROOT / "tests" / "cpu"


def test_every_test_that_is_named_is_there():
    rows = [row.rsplit("|", 2)[1] for row in (ROOT / "docs" / "serving.md").read_text().splitlines() if row[:2] == "| "]
    names = {name for row in rows for name in re.findall(r"`([a-z_0-9]+)(?:\[\w+\])?`", row)}
    modules = {path.stem.removeprefix("test_"): path.read_text() for path in CPU.glob("test_*.py")}
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    tests = {name for text in modules.values() for name in re.findall(r"^def test_(\w+)", text, re.MULTILINE)}
    unknown = names - tests - set(modules) - scripts
    assert len(names & tests) > 60 and not unknown, unknown
