"""gqa_prep and convolve of csrc/, run on the CPU: the cases for the GPU, which are what the torch forms give."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
import torch
from compare import assert_close

from kdtp import kernels
from kdtp.model.weights.kdtr import Bf16
from tests.cpu.cuda_on_cpu import Library
from tests.gpu import rooms

OPS = ("gqa_prep", "convolve")
pytestmark = pytest.mark.xdist_group("cuda-draft")  # they share the compiled kernels


@pytest.fixture(scope="module", params=OPS)
def room(request, tmp_path_factory):
    """The compiled op, and its cases."""
    if not shutil.which("g++"):
        pytest.skip("no g++")
    return Library(request.param, tmp_path_factory.mktemp("cuda")), list(rooms.cases(request.param))


def test_cases(room):
    library, cases = room
    assert not {case.name: wrong for case in cases if (wrong := library.wrong(case))}


def test_a_wrong_bit_is_seen(room):
    """Of each output, in each dtype."""
    library, cases = room
    for case in (cases[0], cases[-1]):
        for name, output in case.outputs.items():
            expected = (
                Bf16(output.expected.bits.copy()) if isinstance(output.expected, Bf16) else output.expected.copy()
            )
            pattern = expected.bits if isinstance(expected, Bf16) else expected
            pattern.reshape(-1).view(np.uint8)[0] ^= 1
            outputs = {**case.outputs, name: dataclasses.replace(output, expected=expected)}
            assert library.wrong(dataclasses.replace(case, outputs=outputs)) == [name]


def tensor(array):
    if isinstance(array, Bf16):
        return torch.from_numpy(array.bits.astype(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def test_torch_convolves_alike():
    """To the bit: rounded at the same places. More taps than four torch adds in another order."""
    count = 0
    for case in rooms.cases("convolve"):
        x, dynamic, base = (tensor(case.inputs[name]) for name in ("x", "dynamic", "base"))
        if case.scalars["taps"] <= 4:
            found = kernels.convolve(x, dynamic.flatten(1), base, case.scalars["side"], case.scalars["n"])
            assert_close(found, tensor(case.outputs["out"].expected))
            count += 1
    assert count > 16


def test_torch_prepares_alike():
    """But for the order in which squares are added: an ulp of float32, which seldom makes one of bfloat16."""
    for case in rooms.cases("gqa_prep"):
        inputs = {name: tensor(array) for name, array in case.inputs.items()}
        if "q" in inputs:
            found = dict(zip(("q_out", "kv_out"), kernels.gqa_prep(eps=case.scalars["eps"], **inputs), strict=True))
        else:
            found = {"kv_out": kernels.gqa_prep_kv(eps=case.scalars["eps"], **inputs)}
        rtol = 2.0**-7 if case.scalars["dtype"] else 1e-6
        for name, output in case.outputs.items():
            want = tensor(output.expected)
            assert_close(found[name], want, atol=rtol, rtol=rtol)
            if want.dtype == torch.bfloat16:
                assert (found[name] != want)[~want.isnan()].double().mean() < 1e-3 or not want.numel(), case.name


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(*shape, dtype=dtype)


def prepare(**change):
    made = {"q": zeros(3, 4, 8), "kv": zeros(3, 4, 8), "q_weight": zeros(8), "k_weight": zeros(8)}
    angles = {"cos": zeros(3, 4), "sin": zeros(3, 4)}
    return kernels.gqa_prep(**made | angles | change, eps=1e-6)


def convolve(**change):
    made = {"x": zeros(6, 8), "dynamic": zeros(6, 2 * 3 * 4), "base": zeros(2, 3, 8), "side": 1, "n": 3}
    return kernels.convolve(**made | change)


def test_as_they_should_be():
    assert [x.shape for x in prepare()] == [(3, 4, 8), (2, 3, 2, 8)] and convolve().shape == (6, 8)


@pytest.mark.parametrize(
    ("call", "change", "error", "text"),
    [
        (prepare, {"q": zeros(3, 4, 6)}, ValueError, r"gqa_prep: q has shape \[3, 4, 6\]: must be \[3, \*, 8\]"),
        (prepare, {"q": zeros(3, 8, 4).mT}, ValueError, r"gqa_prep: q has strides \[32, 1, 4\]: must be contiguous"),
        (prepare, {"q": zeros(3, 4, 8, dtype=torch.bfloat16)}, TypeError, "gqa_prep: q is torch.bfloat16: must be"),
        (prepare, {"kv": zeros(3, 4, 8, dtype=torch.float64)}, TypeError, "gqa_prep: kv is torch.float64: must be"),
        (prepare, {"kv": zeros(3, 3, 8)}, ValueError, r"gqa_prep: kv has shape \[3, 3, 8\]: heads and their"),
        (prepare, {"kv": zeros(3, 4, 7)}, ValueError, r"gqa_prep: kv has shape \[3, 4, 7\]: heads and their"),
        (prepare, {"k_weight": zeros(4)}, ValueError, "gqa_prep: k_weight has shape"),
        (prepare, {"sin": zeros(3, 1, 4)}, ValueError, "gqa_prep: sin has shape"),
        (prepare, {"cos": zeros(3, 4, dtype=torch.bfloat16)}, TypeError, "gqa_prep: cos is torch.bfloat16"),
        (convolve, {"x": zeros(6, 8, dtype=torch.float16)}, TypeError, "convolve: x is torch.float16: must be"),
        (convolve, {"base": zeros(2, 3, 9)}, ValueError, r"convolve: base has shape \[2, 3, 9\]: must be \[2, \*, 8\]"),
        (convolve, {"base": zeros(2, 0, 8)}, ValueError, r"convolve: dynamic has 24 columns: must be 2 \* 0 \*"),
        (convolve, {"dynamic": zeros(6, 18)}, ValueError, r"convolve: dynamic has 18 columns: must be 2 \* 3 \*"),
        (convolve, {"dynamic": zeros(6, 25)}, ValueError, "convolve: dynamic has 25 columns: must be"),
        (convolve, {"dynamic": zeros(6, 0)}, ValueError, "convolve: dynamic has 0 columns: must be"),
        (convolve, {"dynamic": zeros(5, 24)}, ValueError, "convolve: dynamic has shape"),
        (convolve, {"side": 2}, ValueError, "convolve: side 2: must be 0 or 1"),
        (convolve, {"n": 4}, ValueError, "convolve: n 4: must be a divisor of the rows, 6"),
        (convolve, {"n": 0}, ValueError, "convolve: n 0: must be"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(call, change, error, text):
    with pytest.raises(error, match=f"^{text}"):
        call(**change)


def test_the_kernels_refuse_what_they_cannot_take(room):
    """As tests/gpu/test_refusals.py has it, which needs the library."""
    library, cases = room
    changes = {"gqa_prep": {"width": 258, "heads": 1025}, "convolve": {"groups": 3, "taps": 0, "side": -1}}[cases[0].op]
    for field, value in changes.items():
        with pytest.raises(ValueError, match=f"^{cases[0].op}: {field} {value}: must "):
            library.wrong(dataclasses.replace(cases[0], scalars={**cases[0].scalars, field: value}))
