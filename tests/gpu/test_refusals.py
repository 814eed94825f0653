"""Arguments that cannot be are refused before anything is launched, by op, field and value; no rows are legal.

All pointers are null: a kernel that was launched would fault.
"""

from __future__ import annotations

import pytest

from kdtp.kernels.abi import KernelError, library

LEGAL: dict[str, dict[str, int | float]] = {
    "rms_norm": {"rows": 0, "width": 8, "x_stride": 8},
    "silu_mul": {"rows": 0, "width": 8},
    "embedding": {"rows": 0, "width": 8, "vocab": 16},
    "mla_prep": {
        "rows": 0, "heads": 2, "nope": 4, "rope": 4, "lora": 8, "q_stride": 16, "kv_stride": 12, "eps": 1e-6,
    },
    "gqa_prep": {"rows": 0, "heads": 2, "kv_heads": 1, "width": 8, "eps": 1e-6},
    "convolve": {"rows": 0, "width": 8, "taps": 2, "groups": 4, "side": 1, "n": 3},
    "router": {"rows": 0, "experts": 8, "topk": 2, "groups": 4, "topk_group": 2, "norm": 1, "scale": 1.0},
    "topk": {"rows": 0, "vocab": 32, "stride": 32, "k": 4},
    "argmax": {"rows": 0, "vocab": 32, "stride": 32},
    "kv_move": {"layers": 2, "layer_rows": 64, "width": 8, "groups": 0},
    "all_reduce": {
        "rank": 1, "size": 2, "part_bytes": 4096, "blocks": 1, "stamp": 0, "timeout_ns": 1, "rows": 0, "width": 8,
    },
}  # fmt: skip
ILLEGAL: dict[str, dict[str, tuple[int, ...]]] = {
    "rms_norm": {"rows": (-1,), "width": (0, 16385), "x_stride": (7,), "dtype": (2, -1)},
    "silu_mul": {"rows": (-1, 1 << 31), "width": (0, -8, (1 << 20) + 1), "dtype": (2, -1)},
    "embedding": {"rows": (-1, 1 << 31), "width": (0, (1 << 20) + 1), "vocab": (-1, 1 << 31), "dtype": (2,)},
    "mla_prep": {
        "rows": (-1, 1 << 31), "heads": (0, 1025), "nope": (-1, 1 << 20), "rope": (0, 3, 1 << 20), "lora": (0, 1 << 20),
        "q_stride": (15,), "kv_stride": (11,), "dtype": (2,),
    },
    "gqa_prep": {
        "rows": (-1, 1 << 31), "heads": (-1, 1025), "kv_heads": (0, 1025), "width": (0, 3, 258), "dtype": (2,),
    },
    "convolve": {
        "rows": (-3, 4, 3 << 31), "width": (0, (1 << 20) + 4), "taps": (0, 1025), "groups": (0, 3, 16), "side": (-1, 2),
        "n": (0, 1 << 31), "dtype": (2,),
    },
    "router": {
        "rows": (-1, 1 << 31), "experts": (0, 1025), "topk": (0, 5, 33), "groups": (0, 3, 16), "topk_group": (0, 5),
        "scoring": (2, -1), "norm": (2,),
    },
    "topk": {"rows": (-1, 1 << 28), "vocab": (0, (1 << 18) + 1), "stride": (31,), "k": (0, 33, 65)},
    "argmax": {"rows": (-1, 1 << 28), "vocab": (0, (1 << 30) + 1), "stride": (31,)},
    "kv_move": {"layers": (-1, 65536), "layer_rows": (-1,), "width": (0, (1 << 20) + 1), "groups": (-1, 1 << 31)},
    "all_reduce": {
        "rank": (-1, 2), "size": (0, 9), "part_bytes": (4095, 4080), "blocks": (0, 257), "stamp": (-1, 1 << 31),
        "timeout_ns": (0,), "rows": (-1, 1 << 31), "width": (0, 3, 1 << 31), "dtype": (2,),
    },
}  # fmt: skip


@pytest.mark.parametrize("op", LEGAL)
def test_no_rows_launch_nothing(op: str) -> None:
    library().call(op, 0, **LEGAL[op])


@pytest.mark.parametrize(
    ("op", "field", "value"),
    [(op, field, value) for op, fields in ILLEGAL.items() for field, values in fields.items() for value in values],
)
def test_what_is_illegal_is_named(op: str, field: str, value: int) -> None:
    with pytest.raises(KernelError, match=rf"^{op}: {field} {value}: must "):
        library().call(op, 0, **LEGAL[op] | {field: value})


def test_rows_of_the_cache_that_are_not_whole_words() -> None:
    with pytest.raises(KernelError, match=r"^kv_move: width 3: a row must be a multiple of 4 bytes"):
        library().call("kv_move", 0, **LEGAL["kv_move"] | {"width": 3, "dtype": 1})


def test_bias_of_the_router() -> None:
    """It goes with sigmoid only, and with groups that have two experts."""
    with pytest.raises(KernelError, match=r"^router: bias: must be null with softmax"):
        library().call("router", 0, **LEGAL["router"] | {"bias": 64})
    with pytest.raises(KernelError, match=r"^router: groups 8: must have at least 2 experts each"):
        library().call("router", 0, **LEGAL["router"] | {"bias": 64, "groups": 8, "scoring": 1})
