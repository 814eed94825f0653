"""The CUDA library: ctypes twins of csrc/params.h, made from the very file that the library was compiled with."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
from pathlib import Path
from typing import Any

import torch

LIBRARY = Path(__file__).parent / "lib" / "libkdtp.so"
Fields = dict[str, Any]  # of an op's struct, by name: int, float, tensor or None
ILLEGAL = -1
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_STRUCT = re.compile(r"typedef struct (Kdtp(\w+)Args) \{(.*?)\} \1;", re.DOTALL)
_FIELD = re.compile(r"^\s*(?:const\s+)?(void\*|int64_t|double)\s+(\w+);", re.MULTILINE)
_KINDS: dict[str, Any] = {"void*": ctypes.c_void_p, "int64_t": ctypes.c_int64, "double": ctypes.c_double}


class KernelError(RuntimeError):
    """A kernel refused its arguments or failed to launch; the text names op and cause."""


def structs(header: str) -> dict[str, type[ctypes.Structure]]:
    """The struct of each op in params.h, by the op's name ("rms_norm")."""
    found = {}
    for match in _STRUCT.finditer(header):
        fields = [(name, _KINDS[kind]) for kind, name in _FIELD.findall(match.group(3))]
        op = re.sub(r"(?<!^)(?=[A-Z])", "_", match.group(2)).lower()
        found[op] = type(match.group(1), (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})
    return found


class Library:
    """The loaded library. Raises KernelError when it is missing, or was built from another params.h."""

    def __init__(self, path: Path = LIBRARY) -> None:
        if not path.is_file():
            raise KernelError("the CUDA kernels are not built: run `kdtp build-kernels`")
        header = path.parent / "params.h"
        self._lib = ctypes.CDLL(str(path))
        for name in ("kdtp_error", "kdtp_cuda_error", "kdtp_abi"):
            getattr(self._lib, name).restype = ctypes.c_char_p
        built = self._lib.kdtp_abi().decode()
        found = hashlib.sha256(header.read_bytes()).hexdigest()
        if built != found:
            raise KernelError(f"{path} was built from another params.h than {header}: run `kdtp build-kernels`")
        self.structs = structs(header.read_text())

    def call(self, op: str, stream: int, **fields: int | float | torch.Tensor | None) -> None:
        """Run kdtp_<op> on `stream`; tensors are passed by their address, and must live until it has run."""
        self.launch(op, self.arguments(op, stream=stream, **fields))

    def arguments(self, op: str, **fields: int | float | torch.Tensor | None) -> ctypes.Structure:
        """The op's struct; fields that are not named are 0 or null."""
        made = self.structs[op]()
        for name, value in fields.items():
            assert hasattr(made, name), f"{op} has no field {name}"
            setattr(made, name, value.data_ptr() if isinstance(value, torch.Tensor) else value)
        return made

    def launch(self, op: str, arguments: ctypes.Structure) -> None:
        """Run kdtp_<op> on a struct that was made before."""
        self.check(op, getattr(self._lib, f"kdtp_{op}")(ctypes.byref(arguments)))

    def prepare(self, name: str, *arguments: int) -> None:
        """Run kdtp_<name>, an entry without a struct, on numbers and addresses."""
        self.check(name, getattr(self._lib, f"kdtp_{name}")(*map(ctypes.c_int64, arguments)))

    def check(self, op: str, code: int) -> None:
        """Raise KernelError unless an entry's code is 0."""
        if code == ILLEGAL:
            raise KernelError(self._lib.kdtp_error().decode())
        if code:
            raise KernelError(f"{op}: {self._lib.kdtp_cuda_error(code).decode()} (CUDA error {code})")

    def workspace(self, op: str, arguments: ctypes.Structure) -> int:
        """Bytes of workspace that kdtp_<op> needs for these arguments."""
        entry = getattr(self._lib, f"kdtp_{op}_workspace")
        entry.restype = ctypes.c_int64
        return int(entry(ctypes.byref(arguments)))


@functools.cache
def library() -> Library:
    """The library of this process."""
    return Library()
