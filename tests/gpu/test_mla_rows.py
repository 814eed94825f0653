"""A tree node's attention is, bit for bit, that of plain decoding of its path: alone, in a chain, in any batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from kdtp.kernels.abi import library
from kdtp.types import PAGE_ROWS
from tests.gpu.cases_mla import BF16, F32, Seq, Shape, ancestry, chain, one, tables, tree

DTYPES = {F32: torch.float32, BF16: torch.bfloat16}
DEVICE = "cuda"


@dataclass(frozen=True)
class Text:
    """A sequence and its data: q [M, h, D] of its own rows, kv [start + M, D] of all rows."""

    seq: Seq
    q: torch.Tensor
    kv: torch.Tensor


def text(rng: np.random.Generator, shape: Shape, start: int, parents: Sequence[int]) -> Text:
    """A sequence with random data; some keys stand out, and early ones no less than late ones."""
    width = shape.lora + shape.rope
    q = torch.from_numpy(rng.standard_normal((len(parents), shape.heads, width)))
    kv = torch.from_numpy(rng.standard_normal((start + len(parents), width)))
    return Text(Seq(start, parents), q.to(DTYPES[shape.dtype]), kv.to(DTYPES[shape.dtype]))


def decoded(whole: Text, node: int) -> Text:
    """Plain decoding of the node: its ancestors are committed."""
    start, path = whole.seq.start, ancestry(whole.seq.parents, node)
    rows = [*range(start), *(start + i for i in path)]
    return Text(Seq(start + len(path) - 1, one()), whole.q[[node]], whole.kv[rows])


def chained(whole: Text, node: int) -> Text:
    """The node's path as a chain."""
    start, path = whole.seq.start, ancestry(whole.seq.parents, node)
    rows = [*range(start), *(start + i for i in path)]
    return Text(Seq(start, chain(len(path))), whole.q[path], whole.kv[rows])


@dataclass(frozen=True)
class Way:
    """How it is computed, as far as the caller says."""

    split: int = 512
    portable: int = 0


def attend(
    rng: np.random.Generator, shape: Shape, texts: Sequence[Text], padding: int = 0, way: Way = Way()
) -> list[torch.Tensor]:
    """What one call gives the rows of each text; pages in random order, NaN wherever nothing is stored."""
    counts = [-(-len(each.kv) // PAGE_ROWS) for each in texts]
    order = rng.permutation(sum(counts))
    pages = np.zeros((len(texts), max(counts)), np.int32)
    kv = torch.full((len(order) * PAGE_ROWS, shape.lora + shape.rope), torch.nan, dtype=texts[0].kv.dtype)
    for b, (each, count) in enumerate(zip(texts, counts, strict=True)):
        pages[b, :count] = order[sum(counts[:b]) :][:count]
        line = (pages[b, :count, None] * PAGE_ROWS + np.arange(PAGE_ROWS)).ravel()[: len(each.kv)]
        kv[torch.from_numpy(line)] = each.kv
    index = {name: torch.from_numpy(x).to(DEVICE) for name, x in tables([t.seq for t in texts], padding).items()}
    empty = torch.full((padding, *texts[0].q.shape[1:]), torch.nan, dtype=kv.dtype)
    tensors = index | {"q": torch.cat([*(each.q for each in texts), empty]).to(DEVICE), "kv": kv.to(DEVICE)}
    tensors["pages"] = torch.from_numpy(pages).to(DEVICE)
    out = launch(tensors, shape, max(each.seq.start for each in texts), way).cpu()
    assert not out.isnan().any() and not out[len(out) - padding :].any()
    return list(out[: len(out) - padding].split([len(t.q) for t in texts]))


def launch(tensors: dict[str, torch.Tensor], shape: Shape, max_start: int, way: Way) -> torch.Tensor:
    """One call of the library."""
    sizes: dict[str, int | float] = {"rows": len(tensors["q"]), "seqs": len(tensors["starts"]), "max_start": max_start}
    sizes |= {"max_depth": tensors["path"].shape[1], "max_pages": tensors["pages"].shape[1], "dtype": shape.dtype}
    sizes |= {"heads": shape.heads, "lora": shape.lora, "rope": shape.rope, "split": way.split}
    sizes |= {"portable": way.portable, "scale": 2.0 / (shape.lora + shape.rope) ** 0.5}
    out = torch.full((len(tensors["q"]), shape.heads, shape.lora), torch.nan, dtype=tensors["q"].dtype, device=DEVICE)
    size = library().workspace("mla_tree", library().arguments("mla_tree", **sizes))
    space = torch.full((size + 16,), 255, dtype=torch.uint8, device=DEVICE)
    stream = torch.cuda.current_stream().cuda_stream
    library().call("mla_tree", stream, workspace=space, workspace_bytes=size, out=out, **tensors, **sizes)
    return out


SHAPES = (
    Shape(3, 40, 12, F32),
    Shape(8, 512, 64, F32),
    Shape(3, 40, 12, BF16),
    Shape(4, 64, 16, BF16),
    Shape(12, 64, 16, BF16),
    Shape(8, 512, 64, BF16),
    Shape(16, 512, 64, BF16),
)


@pytest.mark.parametrize("start", [0, 60, 64, 125, 700, 2045])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("split", [64, 512])
def test_tree_is_decoding(shape: Shape, start: int, split: int) -> None:
    rng = np.random.default_rng(start)
    whole = text(rng, shape, start, tree(rng, 13))
    way = Way(split)
    [out] = attend(rng, shape, [whole], way=way)
    for node in range(13):
        [alone] = attend(rng, shape, [decoded(whole, node)], way=way)
        assert torch.equal(out[node], alone[0]), f"node {node}: decoded"
    for node in (7, 12):
        [path] = attend(rng, shape, [chained(whole, node)], way=way)
        assert torch.equal(out[node], path[-1]), f"node {node}: chained"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batch_is_alone(shape: Shape) -> None:
    rng = np.random.default_rng(1)
    texts = [text(rng, shape, int(rng.integers(0, 300)), tree(rng, int(rng.integers(1, 20)))) for _ in range(40)]
    alone = [attend(rng, shape, [each])[0] for each in texts]
    for few in (2, 7, 40):  # the last has more rows than are done split by split
        for found, want in zip(attend(rng, shape, texts[:few], padding=few), alone, strict=False):
            assert torch.equal(found, want), f"among {few}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill_is_decoding(shape: Shape) -> None:
    rng = np.random.default_rng(2)
    whole = text(rng, shape, 200, chain(300))
    [out] = attend(rng, shape, [whole])
    for node in (0, 1, 55, 56, 57, 183, 184, 299):
        [alone] = attend(rng, shape, [decoded(whole, node)])
        assert torch.equal(out[node], alone[0]), f"row {node}"


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_portable_form_gives_the_same(shape: Shape) -> None:
    rng = np.random.default_rng(3)
    texts = [text(rng, shape, start, tree(rng, 9)) for start in (0, 200, 1500)]
    here = attend(rng, shape, texts)
    there = attend(rng, shape, texts, way=Way(portable=1))
    assert all(map(torch.equal, here, there))
