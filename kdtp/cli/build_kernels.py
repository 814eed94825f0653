"""`kdtp build-kernels`: compile csrc/ with nvcc into the library that the GPU engine loads. No CMake, no torch."""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
LIBRARY = ROOT / "kdtp" / "kernels" / "lib" / "libkdtp.so"
WORK = ROOT / "build" / "kernels"
SELFTEST = WORK / "selftest"
RACECHECK = WORK / "racecheck" / LIBRARY.name

# Machine code for Hopper (wgmma needs the "a") and for RTX PRO 6000 / GeForce Blackwell, and PTX for what comes after.
TARGETS = (
    "arch=compute_90a,code=sm_90a",
    "arch=compute_120a,code=sm_120a",
    "arch=compute_120,code=compute_120",
)
FLAGS = (
    "-O3",
    "-std=c++17",
    "-lineinfo",
    "-Xcompiler",
    "-fPIC,-Wall",
    "-Xptxas",
    "-v,-warn-spills",
    "-cudart",
    "static",
)
SM120_SHARED_MOST = 101_376  # bytes of shared memory a block can have on sm_120


class BuildError(RuntimeError):
    """The compiler is missing or failed, or what it made breaks a rule; the text says which."""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="compilers at once")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="compile csrc/ops/NAME.cu and no more; nothing is linked"
    )
    parser.add_argument("--selftest", action="store_true", help="build the standalone selftest too")
    parser.add_argument(
        "--racecheck",
        action="store_true",
        help=f"build {RACECHECK.relative_to(ROOT)} instead, for compute-sanitizer's racecheck",
    )


def run(chosen: argparse.Namespace) -> int:
    """Build; exit code 1 with the compiler's words if it fails. ValueError for flags that cannot be."""
    if chosen.jobs < 1:
        raise ValueError(f"--jobs = {chosen.jobs}: must be at least 1")
    ops = {path.stem: path for path in _ops()}
    if not ops:
        raise ValueError(f"{CSRC}: has no kernels; they are compiled in a checkout (pip install -e)")
    if unknown := sorted({*(chosen.only or ())} - {*ops}):
        raise ValueError(f"--only {unknown[0]}: must be among {', '.join(ops)}")
    if chosen.only and chosen.selftest:
        raise ValueError("--selftest: has no effect with --only, which links nothing")
    try:
        if chosen.only:
            compile_all([ops[name] for name in chosen.only], chosen.jobs, chosen.racecheck)
        else:
            build(chosen.jobs, chosen.selftest, chosen.racecheck)
    except BuildError as error:
        print(f"kdtp build-kernels: {error}", file=sys.stderr)
        return 1
    return 0


def _ops() -> list[Path]:
    return sorted((CSRC / "ops").glob("*.cu"))


def build(jobs: int, selftest: bool = False, racecheck: bool = False) -> None:
    """Compile what has changed, check it, and link. Raises BuildError."""
    library = RACECHECK if racecheck else LIBRARY
    objects = compile_all([CSRC / "common" / "kdtp.cu", *_ops()], jobs, racecheck)
    library.parent.mkdir(exist_ok=True)
    link(["-shared", *map(str, objects)], library)
    shutil.copyfile(CSRC / "params.h", library.parent / "params.h")
    if selftest:
        link([str(CSRC / "selftest" / "selftest.cu"), "-ldl"], SELFTEST)
    print(f"{library.relative_to(ROOT)}: {library.stat().st_size / 1e6:.1f} MB from {len(objects)} objects")


def compile_all(sources: Sequence[Path], jobs: int, racecheck: bool = False) -> list[Path]:
    """The objects of `sources`, in their order."""
    nvcc = find_nvcc()
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    WORK.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda source: compile_one(nvcc, version, source, racecheck), sources))


def find_nvcc() -> str:
    """From CUDA_HOME, PATH, or the nvidia-cuda-nvcc wheel. BuildError where there is none."""
    home = os.environ.get("CUDA_HOME")
    packages = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    wheels = sorted(packages.glob("*/bin/nvcc")) if packages.is_dir() else []
    for nvcc in ([Path(home) / "bin" / "nvcc"] if home else []) + [
        Path(shutil.which("nvcc") or "/nonexistent"),
        *wheels,
    ]:
        if nvcc.is_file():
            return str(nvcc)
    raise BuildError("no nvcc in CUDA_HOME, PATH or NVIDIA's wheels; install CUDA 13, or kdtp with its extra `kernels`")


def compile_one(nvcc: str, version: str, source: Path, racecheck: bool) -> Path:
    """The object of `source`, taken from an earlier build if nothing that goes into it has changed since."""
    flags = [
        *FLAGS,
        *(f for target in TARGETS for f in ("-gencode", target)),
        f'-DKDTP_PARAMS_SHA256="{params_hash()}"',
        *(["-DKDTP_RACECHECK"] if racecheck else []),
    ]
    key = hashlib.sha256(repr((version, flags)).encode())
    for path in sorted(included(source)):
        key.update(path.read_bytes())
    target = WORK / f"{source.parent.name}-{source.stem}-{key.hexdigest()[:16]}.o"
    if not target.exists():
        partial = target.with_suffix(f".{os.getpid()}.o")
        done = subprocess.run([nvcc, "-c", *flags, "-o", str(partial), str(source)], capture_output=True, text=True)
        if done.returncode:
            raise BuildError(f"{source.relative_to(ROOT)}:\n{done.stdout}{done.stderr}")
        check_report(source, done.stderr)
        partial.with_suffix(".txt").write_text(done.stderr)
        partial.with_suffix(".txt").rename(target.with_suffix(".txt"))
        partial.rename(target)
        print(f"compiled {source.relative_to(ROOT)}", flush=True)
    return target


def included(source: Path) -> set[Path]:
    """`source` and every file of csrc that it includes, directly or not."""
    found, open_ones = set(), [source.resolve()]
    while open_ones:
        path = open_ones.pop()
        if path not in found:
            found.add(path)
            names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
            open_ones += [(path.parent / name).resolve() for name in names]
    return found


def check_report(source: Path, report: str) -> None:
    """BuildError for a kernel that spills registers, or takes more shared memory than sm_120 has."""
    target, kernel = "", ""
    for line in report.splitlines():
        if match := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            kernel, target = match.groups()
        if match := re.search(r"Registers are spilled .* in function '(\w+)', (\d+) bytes", line):
            raise BuildError(f"{source.name}: {match.group(1)} spills {match.group(2)} bytes")
        if (match := re.search(r"(\d+) bytes spill stores", line)) and int(match.group(1)):
            raise BuildError(f"{source.name}: {kernel} spills {match.group(1)} bytes on {target}")
        used = re.search(r"(\d+) bytes smem", line)
        if used and target.startswith("sm_120") and int(used.group(1)) > SM120_SHARED_MOST:
            raise BuildError(f"{source.name}: {kernel} takes {used.group(1)} bytes of shared memory on {target}")


def link(arguments: Sequence[str], target: Path) -> None:
    """Link into `target`, which is replaced only by a whole file."""
    partial = target.with_suffix(f".{os.getpid()}.tmp")
    nvcc = find_nvcc()
    wheel = Path(nvcc).parents[1] / "lib"  # nvcc looks in lib64, where a toolkit has it
    libraries = [f"-L{wheel}"] if (wheel / "libcudart_static.a").is_file() else []
    targets = [f for t in TARGETS[:2] for f in ("-gencode", t)]
    done = subprocess.run(
        [nvcc, "-std=c++17", "-cudart", "static", *targets, *arguments, *libraries, "-o", str(partial)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise BuildError(f"linking {target.name}:\n{done.stdout}{done.stderr}")
    partial.rename(target)


def params_hash() -> str:
    """sha256 of csrc/params.h, compiled into the library and compared when it is loaded."""
    return hashlib.sha256((CSRC / "params.h").read_bytes()).hexdigest()
