"""scripts/install with a pretended Python: what is installed when, what an interruption leaves, two runs at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.conftest import ROOT

TOOLS = (
    "bash",
    "cat",
    "cksum",
    "cp",
    "dirname",
    "env",
    "flock",
    "mkdir",
    "rm",
    "sh",
    "sleep",
    "timeout",
    "touch",
    "uname",
)
# Takes the place of python3, and as .venv/bin/python that of the environment's. Beside it lie the files that steer it.
PYTHON = """#!/bin/sh
here={tools}
case "$1 $2" in
    -V*) cat $here/version ;;
    "-c import sys, urllib"*) test -e $here/index-answers ;;
    "-c "*) test ! -e $here/is-old ;;
    "-m compileall") echo "$*" >>$here/compiled ;;
    "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo venv >>$here/log ;;
    "-m pip") delay=$(cat $here/delay); echo "$*" >>$here/log; test -e $here/pip-fails || exec sleep "$delay"; exit 1 ;;
    *) echo "unexpected: $*" >>$here/log; exit 1 ;;
esac
"""
PIP = "-m pip install --disable-pip-version-check --no-compile -c constraints.txt -e .[test]"


class Machine:
    """A checkout with scripts/install, and a PATH with nothing but TOOLS and the pretended Python."""

    def __init__(self, folder: Path) -> None:
        self.root, self.tools = folder / "a checkout", folder / "bin"
        (self.root / "scripts").mkdir(parents=True)
        self.tools.mkdir()
        shutil.copy(ROOT / "scripts/install", self.root / "scripts")
        for name in ("pyproject.toml", "constraints.txt"):
            (self.root / name).write_text(name)
        for name in TOOLS:
            (self.tools / name).symlink_to(shutil.which(name) or pytest.fail(f"no {name}"))
        self.add("python3", PYTHON.format(tools=self.tools))
        self.set(version="Python 3.12.1", delay="0", log="")

    def add(self, name: str, program: str) -> None:
        (self.tools / name).write_text(program)
        (self.tools / name).chmod(0o755)

    def set(self, **files: str) -> None:
        for name, text in files.items():
            (self.tools / name.replace("_", "-")).write_text(text)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [self.root / "scripts/install", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env={"PATH": str(self.tools)}, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        )

    def install(self, *arguments: str) -> tuple[int, str, Sequence[str]]:
        """Exit code, stderr, and what the pretended Python was asked to do."""
        before = len(self.log())
        process = self.start(*arguments)
        error = process.communicate(timeout=30)[1]
        return process.returncode, error, self.log()[before:]

    def log(self) -> list[str]:
        return (self.tools / "log").read_text().splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_installs_once(machine: Machine) -> None:
    code, error, log = machine.install()
    assert (code, log) == (0, ["venv", PIP])
    assert "https://download.pytorch.org/whl/cpu gives no answer" in error
    assert machine.install() == (0, "", [])
    assert machine.install("test") == (0, "", [])
    assert (machine.tools / "compiled").read_text() == "-m compileall -qq -j 0 .venv/lib\n"


@pytest.mark.parametrize("change", ["pyproject.toml", "constraints.txt", "version"])
def test_installs_again_after_a_change(machine: Machine, change: str) -> None:
    machine.install()
    where = machine.tools if change == "version" else machine.root
    (where / change).write_text("Python 3.13.0")
    assert machine.install()[2] == [PIP]
    assert machine.install()[2] == []


def test_installs_again_in_another_folder(machine: Machine) -> None:
    machine.install()
    machine.root = machine.root.rename(machine.root.with_name("moved"))
    assert machine.install()[2] == [PIP]


def test_dev_covers_test_but_not_the_reverse(machine: Machine) -> None:
    machine.install("test")
    assert machine.install("dev")[2] == [PIP.replace("test", "dev")]
    assert machine.install("test")[2] == []
    assert machine.install("dev")[2] == []


def test_the_compiler_is_installed_beside_the_rest(machine: Machine) -> None:
    machine.install("dev")
    assert machine.install("kernels")[2] == [PIP.replace("test", "kernels")]
    assert machine.install("kernels")[2] == machine.install("dev")[2] == []


def test_unknown_extra(machine: Machine) -> None:
    assert machine.install("all") == (2, "scripts/install: 'all' must be test, dev or kernels\n", [])


def test_failed_installation_starts_over(machine: Machine) -> None:
    machine.set(pip_fails="")
    assert machine.install()[0] == 1
    (machine.tools / "pip-fails").unlink()
    assert machine.install()[::2] == (0, ["venv", PIP])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_installation_starts_over(machine: Machine, number: int) -> None:
    machine.set(delay="60")
    process = machine.start()
    while PIP not in machine.log():
        time.sleep(0.01)
    (machine.root / ".venv/half-a-package").touch()
    os.killpg(process.pid, number)
    process.wait(timeout=10)
    machine.set(delay="0")
    assert machine.install()[::2] == (0, ["venv", PIP])
    assert not (machine.root / ".venv/half-a-package").exists()


def test_two_at_once_install_once(machine: Machine) -> None:
    machine.set(delay="0.3")
    both = [machine.start(), machine.start()]
    assert [process.wait(timeout=30) for process in both] == [0, 0]
    assert machine.log() == ["venv", PIP]


def test_broken_environment_is_made_anew(machine: Machine) -> None:
    machine.install()
    (machine.root / ".venv/bin/python").unlink()  # as an upgrade of the system's Python does
    assert machine.install()[2] == ["venv", PIP]


def test_no_python(machine: Machine) -> None:
    machine.set(is_old="", version="Python 3.9.2")
    code, error, log = machine.install()
    assert (code, log) == (1, [])
    assert error == "kdtp needs Python 3.11 or later; found: Python 3.9.2\n"
    (machine.tools / "python3").unlink()
    code, error, log = machine.install()
    assert code == 1 and error.startswith("kdtp needs Python 3.11 or later; found: ")


def test_a_later_python_of_another_name(machine: Machine) -> None:
    machine.add("python3.12", (machine.tools / "python3").read_text())
    machine.add("python3", "#!/bin/sh\nexit 1\n")
    assert machine.install()[::2] == (0, ["venv", PIP])


def test_cpu_wheels_where_the_index_answers_and_there_is_no_gpu(machine: Machine) -> None:
    machine.set(index_answers="")
    index = " --extra-index-url https://download.pytorch.org/whl/cpu -c "
    assert machine.install() == (0, "", ["venv", PIP.replace(" -c ", index)])
    machine.add("nvidia-smi", "#!/bin/sh\n")
    (machine.root / "constraints.txt").write_text("changed")
    assert machine.install() == (0, "", [PIP])
