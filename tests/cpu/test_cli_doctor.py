"""`kdtp doctor`: it says what is there, and fails when something that is needed is not."""

from __future__ import annotations

import argparse
import os
import resource
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from kdtp.cli import doctor


def run() -> int:
    return doctor.run(argparse.Namespace())


def lines(capsys: pytest.CaptureFixture[str]) -> dict[str, tuple[str, str]]:
    """Level and text by subject."""
    found = {}
    for line in capsys.readouterr().out.splitlines():
        level, subject, text = line[:4].strip(), line[6:19].strip(), line[21:]
        found[subject] = level, text
    return found


def test_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    found = lines(capsys)
    assert {"python", "platform", "kdtp", "torch", "numpy", "pyzmq", "msgspec", "rich", "cores"} <= set(found)
    assert {"memory", "shared memory", "open files", "run folder", "loopback"} <= set(found)
    assert {"GPU", "GPUs"} & set(found)
    assert found["numpy"] == ("ok", metadata.version("numpy"))
    assert sys.executable in found["python"][1]
    assert found["torch"][1].startswith(metadata.version("torch"))


def test_torch_build_is_what_torch_says() -> None:
    import torch

    expected = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    assert torch.version.hip or doctor._torch_build(Path(torch.__file__).with_name("version.py")) == expected


@pytest.mark.parametrize(
    ("source", "build"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "CUDA 13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", "ROCm 6.4"),
        ("cuda = '12.8'\n", "CUDA 12.8"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", "CPU"),
    ],
)
def test_torch_builds(tmp_path: Path, source: str, build: str) -> None:
    (tmp_path / "version.py").write_text(source)
    assert doctor._torch_build(tmp_path / "version.py") == build


NEEDS = ("torch>=2.11", "numpy>=1.26", "pyzmq>=26", "msgspec>=0.19", "rich>=13")


def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *records: str) -> None:
    """Make these the only packages installed."""
    for record in records:
        (tmp_path / record).mkdir()
        lines = ["Metadata-Version: 2.4", "Name: x", *(f"Requires-Dist: {need}" for need in NEEDS)]
        (tmp_path / record / "METADATA").write_text("\n".join([*lines, 'Requires-Dist: mypy>=1; extra == "dev"', ""]))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/version.py").write_text("cuda: Optional[str] = '13.0'\n")
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "none"), str(tmp_path)])


def test_missing_and_old_packages_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = ("msgspec-0.9.9.dist-info", "numpy-99.1.2+cpu.dist-info", "Rich-13.egg-info", "torch-2.11.0.dist-info")
    packages(tmp_path, monkeypatch, "kdtp-0.1.0.dist-info", "pyzmq.egg-info", *old)
    assert run() == 1
    found = lines(capsys)
    assert found["pyzmq"] == ("FAIL", "not installed; pyzmq>=26 is needed")
    assert found["msgspec"] == ("FAIL", "0.9.9; msgspec>=0.19 is needed")
    assert found["rich"] == ("ok", "13")
    assert found["numpy"] == ("ok", "99.1.2+cpu")
    assert found["torch"] == ("ok", "2.11.0, CUDA 13.0 build")
    assert "mypy" not in found


def test_kdtp_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages(tmp_path, monkeypatch, "numpy-2.0.dist-info")
    assert run() == 1
    assert lines(capsys)["packages"][0] == "FAIL"


def test_versions_are_those_of_importlib() -> None:
    found = doctor._installed()
    for name in ("kdtp", "torch", "numpy", "pyzmq", "msgspec", "rich"):
        assert found[name].version == metadata.version(name)


def test_little_is_imported() -> None:
    """Beyond what every interpreter of this environment imports by itself."""
    show = "import sys; print(*sys.modules); from kdtp.cli import doctor; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    before, after = (set(line.split()) for line in done.stdout.splitlines())
    assert not {"torch", "numpy", "dataclasses", "platform", "importlib.metadata", "subprocess"} & (after - before)


@pytest.mark.parametrize(
    ("script", "level", "text"),
    [
        ("echo '0, NVIDIA H200, 143771 MiB, 570.1'", "ok", "0, NVIDIA H200, 143771 MiB, 570.1"),
        ("echo no driver; exit 9", "warn", "nvidia-smi fails with code 9: no driver"),
        ("exec sleep 30", "warn", "timed out"),
    ],
)
def test_gpus(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    script: str,
    level: str,
    text: str,
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(doctor, "_SMI_PATIENCE", 0.5)
    assert run() == 0
    found = lines(capsys)
    shown = found.get("GPU") or found["GPUs"]
    assert shown[0] == level and text in shown[1]


def test_run_folder_that_cannot_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(deep))
    assert run() == 1
    level, text = lines(capsys)["run folder"]
    assert level == "FAIL" and "a socket's path may have 107 bytes" in text
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run() == 0
    assert lines(capsys)["run folder"] == ("ok", f"can be made in {tmp_path}")
    assert [path.name for path in tmp_path.iterdir()] == ["d" * 60]


def test_little_of_everything(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(address: tuple[str, int]) -> socket.socket:
        raise OSError("no loopback")

    monkeypatch.setattr(doctor, "_LEAST_MEMORY", 1 << 60)
    monkeypatch.setattr(doctor, "_LEAST_SHM", 1 << 60)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    monkeypatch.setattr(socket, "create_server", refuse)
    assert run() == 1
    found = lines(capsys)
    assert [found[key][0] for key in ("memory", "shared memory", "open files", "loopback")] == ["warn"] * 3 + ["FAIL"]
    assert found["open files"][1] == "at most 256, can be raised to 4096"
