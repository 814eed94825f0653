"""`kdtp doctor`: what kdtp finds on this machine, and what is missing.

It answers at once, so it imports little: no torch, and none of dataclasses, platform and importlib.metadata, which
together take longer than all the looking.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import shutil
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from kdtp.engine import rundir
from kdtp.version import __version__

_GIB = 1 << 30
_LEAST_MEMORY = _GIB  # bytes free; a worker with torch takes about a quarter of it before any weights
_LEAST_SHM = 64 << 20  # bytes; Docker's default
_LEAST_FILES = 1024
_SMI_PATIENCE = 2.0  # seconds


class Finding(NamedTuple):
    """One line. level: "ok", "warn" (kdtp runs, with less) or "FAIL" (it does not)."""

    level: str
    subject: str
    text: str


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Nothing: the command takes no flags."""


def run(_: argparse.Namespace) -> int:
    """Print all findings; code 1 if one of them is a FAIL."""
    failed = False
    for finding in findings():
        print(f"{finding.level:4}  {finding.subject:13}  {finding.text}", flush=True)
        failed |= finding.level == "FAIL"
    return int(failed)


def findings() -> Iterable[Finding]:
    """Everything there is to say, without importing torch."""
    yield Finding("ok", "python", f"{sys.version.split()[0]} at {sys.executable}")
    yield Finding("ok" if sys.platform == "linux" else "warn", "platform", _platform())
    yield Finding("ok", "kdtp", f"{__version__} in {Path(__file__).parent.parent}")
    yield from _packages()
    yield from _devices()
    yield Finding("ok", "cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}")
    yield _memory(Path("/proc/meminfo"))
    yield _shared_memory(Path("/dev/shm"))
    yield _open_files()
    yield _run_folder()
    yield _loopback()


def _platform() -> str:
    machine = os.uname()
    system = f"{machine.sysname} {machine.release} {machine.machine}"
    return system if sys.platform == "linux" else f"{system} (kdtp is made for Linux)"


def _packages() -> Iterable[Finding]:
    """Installed versions of what kdtp's own package metadata asks for."""
    installed = _installed()
    if "kdtp" not in installed:
        yield Finding("FAIL", "packages", "kdtp is not installed: pip install -c constraints.txt -e .")
        return
    about = (installed["kdtp"].record / "METADATA").read_text()
    for line in re.findall(r"^Requires-Dist: ([^;\n]+)$", about, re.MULTILINE):  # with a ; it is of an extra
        name, least = line.split(">=")
        if name not in installed:
            yield Finding("FAIL", name, f"not installed; {line} is needed")
            continue
        found, record = installed[name]
        if _numbers(found) < _numbers(least):
            yield Finding("FAIL", name, f"{found}; {line} is needed")
        else:
            build = f", {_torch_build(record.parent / 'torch/version.py')} build" if name == "torch" else ""
            yield Finding("ok", name, found + build)


class Package(NamedTuple):
    """An installed package: its version, and the folder with its METADATA."""

    version: str
    record: Path


def _installed() -> dict[str, Package]:
    """Every package on sys.path by its normalised name, the first of each."""
    found: dict[str, Package] = {}
    for folder in filter(os.path.isdir, sys.path):
        for entry in os.listdir(folder):
            stem, suffix = os.path.splitext(entry)
            name, _, version = stem.partition("-")
            if suffix in (".dist-info", ".egg-info") and version:
                found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), Package(version, Path(folder, entry)))
    return found


def _numbers(version: str) -> list[int]:
    """The leading numbers of a version: "2.13.0+cpu" is [2, 13, 0]."""
    plain = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in plain.group().split(".")] if plain else []


def _torch_build(version: Path) -> str:
    """ "CPU", "CUDA 13.0" and so on, as torch/version.py says; that file is read and not run."""
    source = version.read_text()
    for kind, label in (("cuda", "CUDA"), ("hip", "ROCm"), ("xpu", "XPU")):
        if found := re.search(rf"^{kind}\b.*= '(.+)'$", source, re.MULTILINE):
            return f"{label} {found.group(1)}"
    return "CPU"


def _devices() -> Iterable[Finding]:
    if not shutil.which("nvidia-smi"):
        yield Finding("ok", "GPUs", "none (no nvidia-smi); kdtp runs on the CPU")
        return
    import subprocess  # only where there is something to run

    query = ["nvidia-smi", "--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_PATIENCE)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Finding("warn", "GPUs", f"nvidia-smi gives no answer: {error}")
        return
    lines = answer.stdout.splitlines()
    if answer.returncode != 0 or not lines:
        yield Finding("warn", "GPUs", f"nvidia-smi fails with code {answer.returncode}: {' '.join(lines)}")
    else:
        yield from (Finding("ok", "GPU", line) for line in lines)


def _memory(meminfo: Path) -> Finding:
    sizes = {key: int(kib) << 10 for key, kib in re.findall(r"^(\w+): +(\d+) kB$", meminfo.read_text(), re.MULTILINE)}
    free, total = sizes["MemAvailable"], sizes["MemTotal"]
    return _size("memory", free, _LEAST_MEMORY, f"of {total / _GIB:.1f} GiB free")


def _shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding("warn", "shared memory", f"no {folder}")
    space = os.statvfs(folder)
    return _size("shared memory", space.f_bavail * space.f_frsize, _LEAST_SHM, f"free in {folder}")


def _size(subject: str, found: int, least: int, text: str) -> Finding:
    if found >= least:
        return Finding("ok", subject, f"{found / _GIB:.1f} GiB {text}")
    return Finding("warn", subject, f"{found / _GIB:.2f} GiB {text}; {least / _GIB:.2f} GiB would be good")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    level = "ok" if soft >= _LEAST_FILES else "warn"
    return Finding(level, "open files", f"at most {soft}, can be raised to {hard}")


def _run_folder() -> Finding:
    """Make one as an engine does, which checks owner, mode and the length of socket paths."""
    try:
        folder = rundir.create()
    except (ValueError, OSError) as error:
        return Finding("FAIL", "run folder", str(error))
    rundir.remove(folder)
    return Finding("ok", "run folder", f"can be made in {folder.parent}")


def _loopback() -> Finding:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            return Finding("ok", "loopback", f"127.0.0.1 can be bound (port {server.getsockname()[1]})")
    except OSError as error:
        return Finding("FAIL", "loopback", f"127.0.0.1 cannot be bound, which workers need: {error}")
