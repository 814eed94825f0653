"""The comparisons that GPU tests rest on see what they must see; they need no GPU themselves."""

from __future__ import annotations

import numpy as np
import pytest

from kdtp.kernels import abi
from kdtp.model.weights import kdtr
from scripts.gen_kernel_cases import ROOT, pack
from tests.gpu.cases import BF16, F32, Case, Output, bf16, f32, typed
from tests.gpu.rooms import check_fields
from tests.gpu.running import difference, raw, unlike

WANT = np.array([[1.0, -2.0, 0.0], [np.nan, np.inf, 8.0]], np.float32)


def found(at: tuple[int, int], value: float, output: Output, dtype: int) -> str | None:
    """What is said of WANT with one element changed."""
    changed = WANT.copy()
    changed[at] = value
    return difference(output, raw(typed(changed, dtype)))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("tolerance", [0.0, 0.125])
@pytest.mark.parametrize(
    ("at", "value"),
    [((0, 1), -3.0), ((1, 0), 0.0), ((0, 0), np.nan), ((1, 1), -np.inf), ((1, 1), 1.0), ((1, 2), np.inf)],
)
def test_a_wrong_element_is_named(dtype: int, tolerance: float, at: tuple[int, int], value: float) -> None:
    output = Output(typed(WANT, dtype), tolerance, tolerance)
    text = found(at, value, output, dtype)
    assert text is not None
    assert f"1 of 6 wrong, worst at [{at[0]}, {at[1]}]: found {value}" in text


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_what_agrees(dtype: int) -> None:
    want = typed(WANT, dtype)
    assert difference(Output(want), raw(want)) is None
    assert found((1, 2), 8.5, Output(want, rtol=2**-4), dtype) is None
    assert found((1, 2), 8.5, Output(want, atol=0.5), dtype) is None
    assert found((1, 2), 8.5, Output(want, rtol=2**-5), dtype) is not None
    assert found((0, 2), -0.0, Output(want), dtype) is not None  # every bit
    assert found((0, 2), -0.0, Output(want, atol=1e-9), dtype) is None
    mask = np.ones((2, 3), bool)
    mask[0, 1] = False
    assert found((0, 1), 9.0, Output(want, mask=mask), dtype) is None
    assert found((0, 0), 9.0, Output(want, mask=mask), dtype) is not None


def test_integers_are_compared_by_every_bit() -> None:
    want = np.array([2**62, -1], np.int64)
    assert difference(Output(want), raw(want)) is None
    assert difference(Output(want), raw(want + np.array([1, 0]))) is not None
    assert unlike(raw(want), raw(want)) is None
    assert unlike(raw(want), raw(want + np.array([0, 1]))) == "8 bytes differ, from byte 8 of 16"


def example() -> Case:
    x = np.zeros((2, 4), np.float32)
    scalars = {"rows": 2, "width": 2, "dtype": F32}
    return Case("silu", "silu_mul", scalars, {"x": x}, {"out": Output(bf16(x[:, :2]), 0.5, initial=bf16(x[:, :2]))})


def test_a_case_that_does_not_fit_its_struct_is_refused() -> None:
    struct = abi.structs((ROOT / "csrc" / "params.h").read_text())["silu_mul"]
    check_fields(example(), struct)
    for change in ({"scalars": {"rows": 2}}, {"inputs": {"y": WANT}}, {"inputs": {"out": WANT}}):
        with pytest.raises(ValueError, match="silu: "):
            check_fields(Case(**{**vars(example()), **change}), struct)


def test_cases_are_packed_as_the_selftest_reads_them(tmp_path) -> None:
    values, arrays = pack(3, example())
    kdtr.write(tmp_path / "cases.kdtr", values, arrays)
    with kdtr.Reader(tmp_path / "cases.kdtr") as reader:
        assert reader.metadata == {
            "3.name": "silu", "3.op": "silu_mul", "3.scalar.rows": 2, "3.scalar.width": 2, "3.scalar.dtype": 0,
            "3.atol.out": 0.5, "3.rtol.out": 0.0,
        }  # fmt: skip
        assert list(reader.entries) == ["3.in.x", "3.want.out", "3.initial.out"]
        assert f32(kdtr.Bf16(reader.array("3.want.out"))).tolist() == [[0.0, 0.0], [0.0, 0.0]]
