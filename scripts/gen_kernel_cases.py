"""Write the kernel cases of tests/gpu to a KDTR file, from which csrc/selftest runs them without Python.

    python scripts/gen_kernel_cases.py [--out build/kernels/cases.kdtr] [--room ROOM ...]
    build/kernels/selftest kdtp/kernels/lib/libkdtp.so kdtp/kernels/lib/params.h build/kernels/cases.kdtr [substring]
    compute-sanitizer --tool memcheck build/kernels/selftest ...        # initcheck; racecheck with the library that
                                                                        # build_kernels.py --racecheck makes

The file's metadata: `format` = kdtp-kernel-cases, `params` = sha256 of csrc/params.h, `cases` = their number; and of
case i:

    i.name, i.op             text
    i.scalar.FIELD           int or float: every number of the op's struct but workspace_bytes
    i.atol.FIELD, i.rtol.FIELD   float, of an output; both 0: every bit, but any NaN equals any NaN

Its arrays, of case i:

    i.in.FIELD               an input
    i.want.FIELD             what an output must hold afterwards
    i.initial.FIELD          what it holds before, of the same shape; without it, it is poisoned
    i.mask.FIELD             bool of that shape: the elements that count; without it, all
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from kdtp.kernels import abi  # noqa: E402
from kdtp.model.weights import kdtr  # noqa: E402
from tests.gpu import rooms  # noqa: E402
from tests.gpu.cases import Array, Case  # noqa: E402


def pack(index: int, case: Case) -> tuple[dict[str, kdtr.Value], dict[str, Array]]:
    """The metadata and arrays of one case."""
    values: dict[str, kdtr.Value] = {f"{index}.name": case.name, f"{index}.op": case.op}
    values |= {f"{index}.scalar.{field}": value for field, value in case.scalars.items()}
    arrays = {f"{index}.in.{field}": array for field, array in case.inputs.items()}
    for field, output in case.outputs.items():
        values |= {f"{index}.atol.{field}": float(output.atol), f"{index}.rtol.{field}": float(output.rtol)}
        parts = {"want": output.expected, "initial": output.initial, "mask": output.mask}
        arrays |= {f"{index}.{part}.{field}": array for part, array in parts.items() if array is not None}
    return values, arrays


def write(path: Path, chosen: list[str]) -> int:
    """Write the cases of these rooms; how many they are. Raises ValueError for a case that does not fit params.h."""
    header = (ROOT / "csrc" / "params.h").read_bytes()
    structs = abi.structs(header.decode())
    found = [case for room in chosen for case in rooms.cases(room)]
    values: dict[str, kdtr.Value] = {"format": "kdtp-kernel-cases", "params": hashlib.sha256(header).hexdigest()}
    values["cases"] = len(found)
    arrays: dict[str, Array] = {}
    for index, case in enumerate(found):
        rooms.check_fields(case, structs[case.op])
        more_values, more_arrays = pack(index, case)
        values |= more_values
        arrays |= more_arrays
    path.parent.mkdir(parents=True, exist_ok=True)
    kdtr.write(path, values, arrays)
    return len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "kernels" / "cases.kdtr")
    parser.add_argument("--room", nargs="+", choices=rooms.names(), default=rooms.names(), help="default: all")
    chosen = parser.parse_args()
    count = write(chosen.out, chosen.room)
    print(f"{chosen.out}: {count} cases, {chosen.out.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
