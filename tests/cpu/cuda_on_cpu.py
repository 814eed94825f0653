"""Runs kernels from their own source on the CPU, through the same entries: for those that compute with integers, or
with floats in one fixed order. tests/cpu/cuda/ has the little of CUDA that they need."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np

from kdtp.kernels import abi
from tests.conftest import ROOT
from tests.gpu.cases import Case
from tests.gpu.running import before, difference, raw

CSRC = ROOT / "csrc"
CUDA = ROOT / "tests" / "cpu" / "cuda"
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-ffp-contract=off"]
SHARED = re.compile(r"extern __shared__ (\w+) (\w+)\[\];")
LAUNCH = re.compile(r"([\w:]+)<<<(.*?)>>>\((.*?)\);", re.DOTALL)
MARGIN = np.full(64, 0xFF, np.uint8)  # behind each array; must stay as it is


def translate(source: str) -> str:
    """The two things that are not C++: memory whose size the launch gives, and the launch."""
    source = SHARED.sub(r"\1* const \2 = reinterpret_cast<\1*>(cuda_on_cpu::dynamic_shared.get());", source)
    return LAUNCH.sub(r"cuda_on_cpu::launch(\2, [&] { \1(\3); });", source)


class Library:
    """csrc/ops/`name`.cu, compiled by g++ into `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        for path in CSRC.rglob("*.*"):
            copy = folder / "csrc" / path.relative_to(CSRC)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(translate(path.read_text()))
        shutil.copy(CUDA / "launch.cuh", folder / "csrc" / "common")
        sources = [folder / "csrc" / "common" / "kdtp.cu", folder / "csrc" / "ops" / f"{name}.cu"]
        paths = ["-I", CUDA, "-include", "cuda_runtime.h", "-o", folder / "library.so"]
        subprocess.run(["g++", *FLAGS, '-DKDTP_PARAMS_SHA256=""', *paths, "-x", "c++", *sources], check=True)
        self._lib = ctypes.CDLL(str(folder / "library.so"))
        self._lib.kdtp_error.restype = ctypes.c_char_p
        self._structs = abi.structs((CSRC / "params.h").read_text())

    def wrong(self, case: Case) -> list[str]:
        """What is not as the case has it, by field, and what was written where nothing may be; ValueError if the kernel
        refuses it."""
        inputs = {name: raw(array) for name, array in case.inputs.items()}
        initial = inputs | {name: before(output) for name, output in case.outputs.items()}
        buffers = {name: np.concatenate([data, MARGIN]) for name, data in initial.items()}
        arguments = self._structs[case.op](**case.scalars)
        for name, data in buffers.items():
            setattr(arguments, name, data.ctypes.data)
        if getattr(self._lib, f"kdtp_{case.op}")(ctypes.byref(arguments)):
            raise ValueError(self._lib.kdtp_error().decode())
        found = {name: data[: -len(MARGIN)] for name, data in buffers.items()}
        wrong = {name for name, output in case.outputs.items() if difference(output, found[name])}
        wrong |= {name for name, data in inputs.items() if not np.array_equal(found[name], data)}
        wrong |= {name for name, data in buffers.items() if not np.array_equal(data[-len(MARGIN) :], MARGIN)}
        return sorted(wrong)
