"""A row of the routed experts has the same bits alone, in any batch, and at any place in it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from kdtp.kernels.abi import DTYPES, KernelError, library

DENSE, INT4 = 0, 1
BATCHES = (2, 7, 8, 33, 64, 100, 400)  # with 16 experts and 4 choices, experts have one tile of rows to many
EXPERTS, TOPK = 16, 4


@dataclass(frozen=True)
class Experts:
    """The matrices of all experts, as the kernel has them; with scales they are INT4."""

    inter: int
    w_gate_up: torch.Tensor
    w_down: torch.Tensor
    s_gate_up: torch.Tensor | None = None
    s_down: torch.Tensor | None = None
    count: int = EXPERTS


def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Experts) -> torch.Tensor:
    """moe of these rows."""
    out = torch.full_like(x, torch.nan)
    shape = {"rows": x.shape[0], "hidden": x.shape[1], "inter": experts.inter, "experts": experts.count}
    shape |= {"topk": ids.shape[1], "format": DENSE if experts.s_down is None else INT4, "dtype": DTYPES[x.dtype]}
    size = max(library().workspace("moe", library().structs["moe"](**shape)), 0)  # below 0: the call will be refused
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8, device=x.device)
    matrices = {name: getattr(experts, name) for name in ("w_gate_up", "w_down", "s_gate_up", "s_down")}
    arrays = {"x": x, "ids": ids, "weights": weights, "out": out, "workspace": workspace}
    stream = torch.cuda.current_stream().cuda_stream
    library().call("moe", stream, **arrays, **matrices, workspace_bytes=size, **shape)
    torch.cuda.synchronize()  # the workspace is in use until then
    return out


def dense(random: torch.Generator, hidden: int, inter: int, dtype: torch.dtype) -> Experts:
    """Random experts."""
    shapes = ((EXPERTS, 2 * inter, hidden), (EXPERTS, hidden, inter))
    made = [torch.randn(shape, generator=random, device=random.device) / shape[-1] ** 0.5 for shape in shapes]
    return Experts(inter, *(matrix.to(dtype) for matrix in made))


def packed(random: torch.Generator, hidden: int, inter: int, count: int = EXPERTS) -> Experts:
    """Random INT4 experts: any words are weights, whatever their packing."""
    device = random.device
    words, scales = [], []
    for out, width in ((2 * inter, hidden), (hidden, inter)):
        word = torch.randint(-(2**31), 2**31, (count * out * width // 8,), generator=random, device=device)
        scale = torch.rand(count * out * width // 32, generator=random, device=device) / width**0.5
        words.append(word.to(torch.int32))
        scales.append(scale.to(torch.bfloat16))
    return Experts(inter, *words, *scales, count)


@pytest.mark.parametrize(
    ("kind", "hidden", "inter"),
    [("int4", 7168, 256), ("int4", 320, 64), ("bf16", 512, 96), ("bf16", 70, 13), ("f32", 256, 32)],
)
def test_moe(cuda: torch.device, kind: str, hidden: int, inter: int) -> None:
    random = torch.Generator(cuda).manual_seed(hidden + inter)
    dtype = torch.float32 if kind == "f32" else torch.bfloat16
    experts = packed(random, hidden, inter) if kind == "int4" else dense(random, hidden, inter, dtype)
    rows = max(BATCHES)
    x = torch.randn(rows, hidden, generator=random, device=cuda).to(dtype)
    ids = torch.rand(rows, EXPERTS, generator=random, device=cuda).topk(TOPK).indices.to(torch.int32)
    weights = torch.rand(rows, TOPK, generator=random, device=cuda)
    alone = torch.cat([run(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], experts) for i in range(rows)])
    assert alone.isfinite().all() and alone.abs().amax(1).min() > 0
    for batch in BATCHES:
        assert torch.equal(run(x[:batch], ids[:batch], weights[:batch], experts), alone[:batch]), batch
        last, their_ids, their_weights = (part[-batch:].flip(0).contiguous() for part in (x, ids, weights))
        assert torch.equal(run(last, their_ids, their_weights, experts), alone[-batch:].flip(0)), batch


def test_all_rows_meet_in_one_expert(cuda: torch.device) -> None:
    """The most crowded items there can be, beside experts that nobody wants."""
    random = torch.Generator(cuda).manual_seed(1)
    experts = packed(random, 320, 64)
    x = torch.randn(300, 320, generator=random, device=cuda).to(torch.bfloat16)
    ids = torch.tensor([3, 4, 9, 15], dtype=torch.int32, device=cuda).repeat(300, 1)
    weights = torch.rand(300, TOPK, generator=random, device=cuda)
    together = run(x, ids, weights, experts)
    for i in (0, 1, 7, 8, 15, 16, 131, 299):
        assert torch.equal(run(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], experts)[0], together[i]), i


def test_a_row_alone_may_lack_experts(cuda: torch.device) -> None:
    """A single row has no list of items: choices of nobody, and of one expert twice, count as they do in a batch."""
    random = torch.Generator(cuda).manual_seed(2)
    experts = packed(random, 320, 64)
    x = torch.randn(2, 320, generator=random, device=cuda).to(torch.bfloat16)
    ids = torch.tensor([[3, -1, 3, EXPERTS], [-1, -1, -1, -1]], dtype=torch.int32, device=cuda)
    weights = torch.rand(2, TOPK, generator=random, device=cuda)
    together = run(x, ids, weights, experts)
    assert together[0].abs().max() > 0 and (together[1] == 0).all()
    for i in range(2):
        assert torch.equal(run(x[i : i + 1], ids[i : i + 1], weights[i : i + 1], experts)[0], together[i]), i


def test_refusals(cuda: torch.device) -> None:
    """Shapes that INT4 experts cannot have, and what is missing, by name and before anything runs."""
    random = torch.Generator(cuda).manual_seed(1)
    x = torch.zeros(1, 320, dtype=torch.bfloat16, device=cuda)
    ids, weights = torch.zeros(1, TOPK, dtype=torch.int32, device=cuda), torch.ones(1, TOPK, device=cuda)
    experts = packed(random, 320, 64)
    for its_x, its_experts, text in (
        (x[:, :96].contiguous(), experts, "moe: hidden 96: must be a multiple of 64"),
        (x.float(), experts, "moe: dtype 0: must be 1"),
        (x, replace(experts, inter=32), "moe: inter 32: must be a multiple of 64"),
        (x, replace(experts, s_gate_up=None), "must be given for INT4 experts"),
    ):
        with pytest.raises(KernelError, match=text):
            run(its_x, ids, weights, its_experts)
