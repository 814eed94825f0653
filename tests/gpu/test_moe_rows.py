"""A row of the routed experts has the same bits alone, in any batch, and at any place in it."""

from __future__ import annotations

import pytest
import torch

from kdtp.kernels.abi import DTYPES, library

DENSE, INT4 = 0, 1
BATCHES = (2, 7, 8, 33, 64, 100, 400)  # with 16 experts and 4 choices, experts have one tile of rows to many
EXPERTS, TOPK = 16, 4


def run(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: dict[str, torch.Tensor]) -> torch.Tensor:
    """moe of these rows; `experts` has its matrices, and scales if they are INT4."""
    out = torch.full_like(x, torch.nan)
    matrices = {name: experts.get(name) for name in ("w_gate_up", "w_down", "s_gate_up", "s_down")}
    shape = {"rows": x.shape[0], "hidden": x.shape[1], "inter": int(experts["inter"]), "experts": EXPERTS, "topk": TOPK}
    shape |= {"format": INT4 if "s_down" in experts else DENSE, "dtype": DTYPES[x.dtype]}
    struct = library().structs["moe"](**shape)
    workspace = torch.full((library().workspace("moe", struct),), 0xFF, dtype=torch.uint8, device=x.device)
    arrays = {"x": x, "ids": ids, "weights": weights, "out": out, "workspace": workspace}
    stream = torch.cuda.current_stream().cuda_stream
    library().call("moe", stream, **arrays, **matrices, workspace_bytes=len(workspace), **shape)
    torch.cuda.synchronize()  # the workspace is in use until then
    return out


def dense(random: torch.Generator, hidden: int, inter: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random experts."""
    shapes = {"w_gate_up": (EXPERTS, 2 * inter, hidden), "w_down": (EXPERTS, hidden, inter)}
    made = {
        name: (torch.randn(shape, generator=random, device=random.device) / shape[-1] ** 0.5).to(dtype)
        for name, shape in shapes.items()
    }
    return made | {"inter": torch.tensor(inter)}


def packed(random: torch.Generator, hidden: int, inter: int) -> dict[str, torch.Tensor]:
    """Random INT4 experts: any words are weights, whatever their packing."""
    device, made = random.device, {"inter": torch.tensor(inter)}
    for name, out, width in (("gate_up", 2 * inter, hidden), ("down", hidden, inter)):
        words = torch.randint(-(2**31), 2**31, (EXPERTS * out * width // 8,), generator=random, device=device)
        scales = torch.rand(EXPERTS * out * width // 32, generator=random, device=device) / width**0.5
        made |= {f"w_{name}": words.to(torch.int32), f"s_{name}": scales.to(torch.bfloat16)}
    return made


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
        turned = [part[-batch:].flip(0).contiguous() for part in (x, ids, weights)]
        assert torch.equal(run(*turned, experts), alone[-batch:].flip(0)), batch


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
