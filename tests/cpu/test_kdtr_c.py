"""The C reader of KDTR: it sees what the Python reader sees and refuses what that refuses, in the same words."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kdtp.model.weights import kdtr
from tests.conftest import ROOT
from tests.cpu.kdtr_cases import EXAMPLE_METADATA, bad_files, dump, example_arrays, mutate, seeds

WARNINGS = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wno-sign-conversion", "-Werror", "-O1", "-g"]
SANITIZER = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
BUILDS = {
    "gcc": ["gcc", "-std=c11"],
    "g++": ["g++", "-x", "c++", "-std=c++17"],
    "gcc-sanitized": ["gcc", "-std=c11", *SANITIZER],
    "g++-sanitized": ["g++", "-x", "c++", "-std=c++17", *SANITIZER],
}
Run = Callable[[Sequence[Path]], str]


def sanitizer_works(folder: Path) -> bool:
    (folder / "empty.c").write_text("int main(void) { return 0; }\n")
    command = ["gcc", *SANITIZER, folder / "empty.c", "-o", folder / "empty"]
    return subprocess.run(command, capture_output=True).returncode == 0


@pytest.fixture(scope="module", params=BUILDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Build the dump program one way; the fixture runs it over files and gives what it prints."""
    command = BUILDS[request.param]
    folder = tmp_path_factory.mktemp("c")
    if shutil.which(command[0]) is None:
        pytest.skip(f"no {command[0]} here")
    if SANITIZER[0] in command and not sanitizer_works(folder):
        pytest.skip("gcc has no sanitizer here")
    program = folder / "kdtr_dump"
    source = ROOT / "csrc/tests/kdtr_dump.c"
    built = subprocess.run(
        [*command, *WARNINGS, "-I", ROOT / "csrc/common", source, "-o", program], capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr

    def output(files: Sequence[Path]) -> str:
        # An allocation above 16 MiB ends the sanitized program: none of the files here is that large.
        env = os.environ | {"ASAN_OPTIONS": "max_allocation_size_mb=16:allocator_may_return_null=0"}
        names = "".join(f"{file}\n" for file in files)
        done = subprocess.run([program], input=names, capture_output=True, text=True, env=env, timeout=60)
        assert done.returncode == 0 and done.stderr == "", done.stderr
        return done.stdout

    return output


def test_sees_what_python_wrote(run: Run, tmp_path: Path) -> None:
    kdtr.write(tmp_path / "f", EXAMPLE_METADATA, example_arrays())
    seen = run([tmp_path / "f"])
    assert seen == dump(tmp_path / "f")
    assert len(seen.splitlines()) == 1 + len(EXAMPLE_METADATA) + len(example_arrays())
    assert "\nmetadata x list 3 int 1 float 4004000000000000 text c3a4\n" in seen
    assert re.search(r"\narray t dtype 2 dims 2 1 at \d+ bytes 16 adler [0-9a-f]{8} 1.5 -2.25\n", seen)


def test_refuses_bad_files_in_the_same_words(run: Run, tmp_path: Path) -> None:
    files, expected = [], ""
    for i, (file, complaint) in enumerate(bad_files().values()):
        files.append(tmp_path / str(i))
        files[-1].write_bytes(file)
        expected += f"file {files[-1]}\nerror {files[-1]}: {complaint}\n"
    assert run(files) == expected


def test_names_a_file_that_cannot_be_read(run: Run, tmp_path: Path) -> None:
    assert run([tmp_path / "none"]).endswith(f"error {tmp_path / 'none'}: file: open: No such file or directory\n")
    assert f"error {tmp_path}: " in run([tmp_path])


def test_mutated_files(run: Run, tmp_path: Path) -> None:
    rng, good = random.Random(12), seeds(tmp_path)
    files = []
    for i in range(2000):
        files.append(tmp_path / f"m{i}")
        files[-1].write_bytes(mutate(rng, good)[1])
    assert run(files) == "".join(map(dump, files))
