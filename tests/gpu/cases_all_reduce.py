"""All-reduce: one rank's call, with the other ranks' parts already in its room.

What the call pushes is seen in the others' rooms, and that it empties its own. How ranks run against each other is
test_all_reduce.py's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.gpu.cases import BF16, F32, Array, Case, Output, f32, typed
from tests.gpu.cases_norm import EPS, TOLERANCE

BLOCKS, STAMP_BYTES, STAMP = 256, 16, 77
ABSENT, NAN = 0xFFFFFFFF, 0x7FFF7FFF
LATE, UNLIKE = 1, 2
SECOND = 1_000_000_000


@dataclass(frozen=True)
class Call:
    """calls: how many came before; blocks: as in params.h."""

    rank: int
    size: int
    rows: int
    width: int
    dtype: int
    norm: bool = False
    calls: int = 0
    blocks: int = 132

    @property
    def pack(self) -> int:
        """Elements in 16 bytes."""
        return 4 if self.dtype == F32 else 8

    @property
    def grid(self) -> int:
        """Blocks that the call has."""
        if self.norm:
            return min(self.rows, self.blocks)
        packs, threads = self.rows * self.width // self.pack, 128
        while threads < 512 and threads * self.blocks < packs:
            threads *= 2
        return min(-(-packs // threads), self.blocks)

    @property
    def stamp(self) -> list[int]:
        """What its blocks write in front of their part."""
        return [STAMP, self.rows, self.width, 2 * self.dtype + self.norm]


def cases() -> Iterator[Case]:
    """Ranks and sizes, one row to more than there are blocks, both halves; late ranks, and ranks in another call."""
    rng = np.random.default_rng(19)
    for dtype in (F32, BF16):
        for rank, size in ((0, 1), (0, 2), (1, 2), (2, 3), (1, 4), (4, 5), (7, 8)):
            yield _good(rng, Call(rank, size, 3, 64, dtype, calls=rank))
            yield _good(rng, Call(rank, size, 3, 64, dtype, norm=True, calls=rank))
        for norm in (False, True):
            yield _good(rng, Call(1, 2, 1, 7168, dtype, norm, 5))
            yield _good(rng, Call(0, 2, 64, 7168, dtype, norm, 2))
            yield _good(rng, Call(1, 3, 11, 264, dtype, norm, 3, blocks=4))
            yield _good(rng, Call(1, 2, 2, 8192, dtype, norm, 1))
            yield _late(rng, Call(1, 3, 5, 256, dtype, norm, 1))
            yield _unlike(rng, Call(2, 4, 5, 256, dtype, norm, 4))
        yield _good(rng, Call(0, 2, 0, 64, dtype))
        yield _good(rng, Call(0, 2, 1, 1 << 18, dtype, blocks=16))


def _good(rng: np.random.Generator, call: Call) -> Case:
    return _case(rng, "sum", call, SECOND, range(call.size), call.stamp)


def _late(rng: np.random.Generator, call: Call) -> Case:
    """Rank 2 has not come."""
    return _case(rng, "late", call, SECOND // 1000, (0, 1), call.stamp)


def _unlike(rng: np.random.Generator, call: Call) -> Case:
    """Rank 0 is in another call, of as much data."""
    return _case(rng, "unlike", call, SECOND, range(call.size), [STAMP + 1, 2 * call.rows, call.width // 2, 0])


def _case(
    rng: np.random.Generator, kind: str, call: Call, timeout: int, present: range | tuple[int, ...], first: list[int]
) -> Case:
    """`first`: the stamp of rank 0."""
    parts = [_part(rng, call) for _ in range(call.size)]
    failed = {"sum": 0, "late": LATE, "unlike": UNLIKE}[kind]
    counted = call.rows > 0
    total = _total(parts, call)
    outputs = {
        "state": Output(_state(call.calls + counted, failed), initial=_state(call.calls, 0)),
        "failure": Output(_failure(kind, first), initial=np.zeros(8, np.int32)),
    }
    worthless = None if failed == 0 else np.zeros((call.rows, call.width), bool)
    inputs: dict[str, Array] = {"x": parts[call.rank]}
    if call.norm:
        residual = typed(rng.standard_normal((call.rows, call.width)), call.dtype)
        inputs["weight"] = rng.standard_normal(call.width).astype(np.float32)
        new = typed(f32(typed(total, call.dtype)) + f32(residual), call.dtype)
        outputs["residual"] = Output(new, initial=residual, mask=worthless)
        wide = f32(new).astype(np.float64)
        normed = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * inputs["weight"]
        outputs["out"] = Output(typed(normed, call.dtype), *TOLERANCE[call.dtype], mask=worthless)
    else:
        outputs["out"] = Output(typed(total, call.dtype), mask=worthless)
    outputs |= _rooms(call, parts, present, first)
    element = "bf16" if call.dtype == BF16 else "f32"
    form = "norm-" if call.norm else ""
    name = f"all_reduce-{kind}-{form}{call.rank}of{call.size}-{call.rows}x{call.width}-{element}-{call.calls}"
    scalars: dict[str, int | float] = {
        "rank": call.rank, "size": call.size, "part_bytes": _part_packs(call) * 16, "blocks": call.blocks,
        "stamp": STAMP, "timeout_ns": timeout, "rows": call.rows, "width": call.width,
        "eps": EPS if call.norm else 0.0, "dtype": call.dtype,
    }  # fmt: skip
    return Case(name, "all_reduce", scalars, inputs, outputs)


def _part(rng: np.random.Generator, call: Call) -> Array:
    """Values whose sum depends on the order; without a norm, one that looks as if it had not come."""
    x = rng.standard_normal((call.rows, call.width)) * 10.0 ** rng.integers(-3, 4, (call.rows, call.width))
    part = typed(x, call.dtype)
    if call.rows and not call.norm:
        _words(part).flat[1] = ABSENT
    return part


def _words(part: Array) -> np.ndarray:
    """The array's memory as 32-bit words."""
    bits = part if isinstance(part, np.ndarray) else part.bits
    return bits.reshape(-1).view(np.uint32)


def _total(parts: list[Array], call: Call) -> np.ndarray:
    total = f32(parts[0]).copy()
    for part in parts[1:]:
        total += f32(part)
    return total


def _state(calls: int, failed: int) -> np.ndarray:
    state = np.full(BLOCKS + 1, calls, np.int32)
    state[BLOCKS] = failed
    return state


def _failure(kind: str, first: list[int]) -> np.ndarray:
    told = {"sum": [], "late": [LATE, 2, STAMP], "unlike": [UNLIKE, 0, STAMP, *first[:3]]}[kind]
    return np.array(told + [0] * (8 - len(told)), np.int32)


def _part_packs(call: Call) -> int:
    return BLOCKS + max(1, call.rows * call.width // call.pack) + 3


def _rooms(call: Call, parts: list[Array], present: range | tuple[int, ...], first: list[int]) -> dict[str, Output]:
    """Every rank's room before and after: the own one is emptied, the others get this rank's part."""
    half, shape = call.calls % 2, (2, call.size, _part_packs(call) * 4)
    empty = np.full(shape, ABSENT, np.uint32)
    own = empty.copy()
    for other in present:
        if other != call.rank and call.rows:
            _fill(own[half, other], call, parts[other], first if other == 0 else call.stamp)
    pushed = empty.copy()
    if call.rows:
        _fill(pushed[half, call.rank], call, parts[call.rank], call.stamp)
    rooms = {f"room{i}": Output(pushed, initial=empty) for i in range(call.size) if i != call.rank}
    return rooms | {f"room{call.rank}": Output(empty, initial=own)}


def _fill(place: np.ndarray, call: Call, part: Array, stamp: list[int]) -> None:
    words = _words(part)
    for block in range(call.grid):
        place[4 * block : 4 * block + 4] = stamp
    place[4 * BLOCKS : 4 * BLOCKS + len(words)] = np.where(words == ABSENT, NAN, words)
