"""kdtp build-kernels with a pretended nvcc: which one is taken, what is compiled again, what fails the build."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdtp.cli import build_kernels
from kdtp.cli.build_kernels import BuildError, check_report, find_nvcc

# Writes what it was called with in place of an object, and the report beside it to stderr.
NVCC = """#!/bin/sh
here=$(dirname "$0")
test "$1" != --version || exec cat $here/version
echo "$@" >>$here/log
cat $here/report >&2
test ! -e $here/fails || exit 1
while test "$1" != -o; do shift; done
echo object >"$2"
"""
REPORT = """ptxas info    : Compiling entry function 'kernel' for 'sm_{target}'
ptxas info    : Function properties for kernel
    0 bytes stack frame, {spilled} bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, {shared} bytes smem
"""


class Toolkit:
    """A folder with the pretended nvcc."""

    def __init__(self, folder: Path) -> None:
        self.nvcc = folder / "bin" / "nvcc"
        self.nvcc.parent.mkdir(parents=True)
        self.nvcc.write_text(NVCC)
        self.nvcc.chmod(0o755)
        self.set(version="13.0", report="", log="")

    def set(self, **files: str) -> None:
        for name, text in files.items():
            (self.nvcc.parent / name).write_text(text)

    def calls(self) -> list[str]:
        return (self.nvcc.parent / "log").read_text().splitlines()


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Toolkit:
    """The only nvcc there is; sources and objects lie in tmp_path."""
    made = Toolkit(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    for name, path in {"ROOT": "", "CSRC": "csrc", "WORK": "build", "LIBRARY": "lib/libkdtp.so"}.items():
        monkeypatch.setattr(build_kernels, name, tmp_path / path)
    for folder in ("common", "ops", "kernels"):
        (tmp_path / "csrc" / folder).mkdir(parents=True)
    (tmp_path / "csrc/params.h").write_text("params")
    (tmp_path / "csrc/common/kdtp.cu").write_text("common")
    (tmp_path / "csrc/kernels/norm.cuh").write_text("kernel")
    (tmp_path / "csrc/ops/norm.cu").write_text('#include "../kernels/norm.cuh"\n')
    return made


def test_both_targets_and_ptx(toolkit: Toolkit) -> None:
    build_kernels.build(2)
    *objects, library = toolkit.calls()
    assert len(objects) == 2 and "-shared" in library
    for call in objects:
        assert all(f"-gencode {target}" in call for target in build_kernels.TARGETS)
    assert {"sm_90a", "sm_120a", "compute_120"} == {target.split("code=")[1] for target in build_kernels.TARGETS}


@pytest.mark.parametrize(
    ("change", "again"),
    [
        (None, []),
        ("csrc/kernels/norm.cuh", ["norm.cu"]),
        ("csrc/common/kdtp.cu", ["kdtp.cu"]),
        ("csrc/params.h", ["kdtp.cu", "norm.cu"]),
        ("cuda/bin/version", ["kdtp.cu", "norm.cu"]),
    ],
)
def test_what_changed_is_compiled_again(toolkit: Toolkit, tmp_path: Path, change: str | None, again: list[str]) -> None:
    build_kernels.build(1)
    toolkit.set(log="")
    if change:
        (tmp_path / change).write_text("other")
    build_kernels.build(1)
    assert [Path(call.split()[-1]).name for call in toolkit.calls()[:-1]] == again


def test_a_failed_compilation_says_what_the_compiler_said(toolkit: Toolkit) -> None:
    toolkit.set(report="norm.cu(3): error", fails="")
    with pytest.raises(BuildError, match=r"^csrc/ops/norm.cu:\nnorm.cu\(3\): error"):
        build_kernels.compile_all([build_kernels.CSRC / "ops/norm.cu"], 1)
    assert not list(build_kernels.WORK.glob("*.o"))


def test_a_refused_object_is_not_kept(toolkit: Toolkit) -> None:
    toolkit.set(report=REPORT.format(target="90a", spilled=8, shared=0))
    for _ in range(2):
        with pytest.raises(BuildError, match=r"^norm.cu: kernel spills 8 bytes on sm_90a$"):
            build_kernels.compile_all([build_kernels.CSRC / "ops/norm.cu"], 1)


def test_a_warning_names_the_kernel_that_spills() -> None:
    where = "Registers are spilled to local memory in function 'wide'"
    with pytest.raises(BuildError, match=r"^norm.cu: wide spills 16 bytes$"):
        check_report(Path("norm.cu"), f"ptxas warning : {where}, 16 bytes spill stores, 12 bytes spill loads")


@pytest.mark.parametrize(
    ("target", "shared", "complaint"),
    [("90a", 200_000, None), ("120a", 101_376, None), ("120a", 101_377, "kernel takes 101377 bytes of shared memory")],
)
def test_shared_memory_of_sm_120(target: str, shared: int, complaint: str | None) -> None:
    report = REPORT.format(target=target, spilled=0, shared=shared)
    if complaint is None:
        check_report(Path("norm.cu"), report)
    else:
        with pytest.raises(BuildError, match=f"^norm.cu: {complaint} on sm_{target}$"):
            check_report(Path("norm.cu"), report)


def test_which_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, path, wheel = (Toolkit(tmp_path / name) for name in ("home", "path", "site/nvidia/cu13"))
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"purelib": str(tmp_path / "site")})
    monkeypatch.setenv("PATH", str(path.nvcc.parent))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    for toolkit, remedy in ((home, "CUDA_HOME"), (path, "PATH"), (wheel, None)):
        assert find_nvcc() == str(toolkit.nvcc)
        if remedy:
            monkeypatch.setenv(remedy, "")
    wheel.nvcc.unlink()
    with pytest.raises(BuildError, match="no nvcc in CUDA_HOME, PATH or NVIDIA's wheels"):
        find_nvcc()


@pytest.mark.parametrize("there", [True, False])
def test_the_wheel_has_its_libraries_in_lib(toolkit: Toolkit, tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "cuda/lib").mkdir()
        (tmp_path / "cuda/lib/libcudart_static.a").touch()
    build_kernels.build(1)
    assert (f"-L{tmp_path / 'cuda/lib'}" in toolkit.calls()[-1]) == there
