"""Each single mistake in what a checkpoint means turns the comparison with transformers red.

One mistake at a time, as loaders of this family have made them: by a changed configuration, or in the place of the one
function that knows better. Every case prints how far the logits go; the comparison's tolerance is 2e-3.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kdtp.kernels import Routing
from kdtp.model import rope
from kdtp.model.comm import Solo
from kdtp.model.shard import Shard
from kdtp.model.weights import hf_model, hf_table
from kdtp.model.weights.hf_config import Int4
from kdtp.model.weights.hf_model import HfModel
from kdtp.model.weights.load import Weights
from kdtp.types import SeqRows
from tests import hf_cases
from tests.hf_golden import TOLERANCE, Golden

Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch, HfModel], None]
ROUTER = sys.modules["kdtp.kernels.router"]  # the package's attribute of that name is the function
PREP = sys.modules["kdtp.kernels.prep"]
PAGES = 2


def config(**changes: Any) -> Mistake:
    """Another value in the model's configuration."""

    def mistake(patch: Patch, model: HfModel) -> None:
        model.config = dataclasses.replace(model.config, **changes)

    return mistake


def yarn(**changes: Any) -> Mistake:
    """Another value in its YaRN settings."""

    def mistake(patch: Patch, model: HfModel) -> None:
        assert model.config.rope_scaling is not None
        changed = dataclasses.replace(model.config.rope_scaling, **changes)
        model.config = dataclasses.replace(model.config, rope_scaling=changed)

    return mistake


def instead(place: object, name: str, other: Callable) -> Mistake:
    """Another function in the place of one; it gets the right one first."""

    def mistake(patch: Patch, model: HfModel) -> None:
        right = getattr(place, name)
        patch.setattr(place, name, lambda *arguments: other(right, *arguments))

    return mistake


def pairs_as_they_are(patch: Patch, model: HfModel) -> None:
    patch.setattr(hf_table, "halves", np.arange)
    model._checkpoint.origins = hf_table.origins(model.config, False)


def rope_from_the_front(patch: Patch, model: HfModel) -> None:
    origins, width = model._checkpoint.origins, model.config.qk_rope_head_dim
    for name in [name for name in origins if name.endswith("w_kv_a")]:
        (origin,) = origins[name]
        rows = np.arange(origin.shape[0])
        order = np.concatenate([rows[width:], hf_table.halves(width)])
        origins[name] = (dataclasses.replace(origin, order=order),)


def biased_weights(right: Callable, logits: torch.Tensor, bias: torch.Tensor, routing: Routing, *rest: Any) -> Any:
    ids, _ = right(logits, bias, routing, *rest)
    weights = (logits.sigmoid() + bias).gather(1, ids)
    return ids, weights / weights.sum(-1, keepdim=True) * routing.scale


def best_of_a_group(right: Callable, scores: torch.Tensor, bias: torch.Tensor, routing: Routing) -> torch.Tensor:
    ranked = (scores + bias).view(len(scores), routing.n_group, -1)
    kept = torch.zeros(ranked.shape[:2], dtype=torch.bool)
    kept.scatter_(1, ranked.amax(-1).topk(routing.topk_group).indices, True)
    return ranked.masked_fill(~kept[..., None], -torch.inf).flatten(1)


def key_one_further(right: Callable, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    turned = right(x, cos, sin)
    turned[:, -1:] = right(x[:, -1:].contiguous(), cos.roll(-1, 0), sin.roll(-1, 0))
    return turned


def reversed_nibbles(right: Callable, words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    octets = words.contiguous().view(torch.uint8)
    swapped = (octets >> 4 | octets << 4).view(*words.shape, 4).flip(-1).flatten(1)
    return right(swapped.view(torch.int32), scales)


def twos_complement(right: Callable, words: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    ones = torch.ones_like(scales)
    unsigned = right(words, ones) + 8
    signed = torch.where(unsigned < 8, unsigned, unsigned - 16)
    return signed * scales.float().repeat_interleave(Int4.GROUP, 1)


def fp8(change: Callable[[torch.Tensor], torch.Tensor]) -> Mistake:
    """The scales of blocks changed as they are read."""
    return instead(HfModel, "_scales", lambda right, *place: change(right(*place)))


MISTAKES: dict[str, tuple[str, Mistake]] = {
    "interleaved pairs taken as halves": ("v3", pairs_as_they_are),
    "YaRN missing": ("v3", config(rope_scaling=None)),
    "YaRN missing, but for the scale": ("v2_lite", yarn(beta_fast=1e6, beta_slow=1e6)),
    "beta_fast 1 for 32": ("k25", yarn(beta_fast=1.0)),
    "beta_fast 32 for 1": ("k2", yarn(beta_fast=32.0)),
    "no mscale^2 in the softmax scale": ("v3", yarn(mscale=0.0, mscale_all_dim=0.0)),
    "amplitude 0.1 ln f + 1": ("v3", instead(rope, "amplitude", lambda right, c: 0.1 * np.log(40) + 1)),
    "correction bias ignored": (
        "k2",
        instead(ROUTER, "_candidates", lambda right, s, bias, r: right(s, torch.zeros_like(bias), r)),
    ),
    "correction bias used in the weights": ("k2", instead(sys.modules["kdtp.kernels"], "router", biased_weights)),
    "softmax for sigmoid": ("k2", instead(ROUTER, "_scores", lambda right, logits, kind: logits.softmax(-1))),
    "sigmoid for softmax": ("v2_lite", instead(ROUTER, "_scores", lambda right, logits, kind: logits.sigmoid())),
    "norm_topk_prob inverted": ("k2", config(norm_topk_prob=False)),
    "norm_topk_prob inverted (softmax)": ("v2", config(norm_topk_prob=True)),
    "scaling factor dropped": ("k2", config(routed_scaling_factor=1.0)),
    "scaling factor dropped (softmax)": ("v2", config(routed_scaling_factor=1.0)),
    "groups ignored": ("v3", config(n_group=1, topk_group=1)),
    "groups ignored (softmax)": ("v2", config(n_group=1, topk_group=1)),
    "group score by the best instead of the two best": ("v3", instead(ROUTER, "_candidates", best_of_a_group)),
    "shared experts dropped": ("moonlight", config(n_shared_experts=0)),
    "kv_a_layernorm dropped": ("v3", instead(PREP, "rms_norm", lambda right, x, weight, eps: x)),
    "kv_a_layernorm without its weight": (
        "v3",
        instead(PREP, "rms_norm", lambda right, x, weight, eps: right(x, torch.ones_like(weight), eps)),
    ),
    "key position off by one": ("v3", instead(PREP, "rope", key_one_further)),
    "rope part from the front of kv_a": ("v3", rope_from_the_front),
    "rope_theta 10000 for 50000": ("moonlight", config(rope_theta=10000.0)),
    "INT4 scale one group off": (
        "k2_int4",
        instead(hf_model, "unpacked", lambda right, words, scales: right(words, scales.roll(1, 1))),
    ),
    "INT4 nibbles reversed": ("k2_int4", instead(hf_model, "unpacked", reversed_nibbles)),
    "INT4 as two's complement": ("k2_int4", instead(hf_model, "unpacked", twos_complement)),
    "FP8 with one mean scale": ("fp8", fp8(lambda scales: torch.full_like(scales, float(scales.mean())))),
    "FP8 divided by its scales": ("fp8", fp8(lambda scales: 1 / scales)),
    "FP8 scales of the wrong axis": ("fp8", fp8(lambda scales: scales.flip(0))),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_is_seen(name, tmp_path, monkeypatch):
    variant, mistake = MISTAKES[name]
    golden = Golden(variant)
    text = golden.texts()[2]
    with HfModel(hf_cases.write(variant, tmp_path)) as model:
        mistake(monkeypatch, model)
        shard = Shard(Weights(model, 0, 1, "float32", lambda done, total: None), Solo(), PAGES)
    rows = SeqRows(0, 0, tuple(text), tuple(range(-1, len(text) - 1)), len(text), new_pages=tuple(range(PAGES)))
    found, want = shard.forward_tokens([rows]).numpy(), golden.logits[2]
    difference = np.abs(found - want)
    relative = np.median(np.sqrt((difference**2).mean(-1) / (want**2).mean(-1)))
    same = int((found.argmax(-1) == want.argmax(-1)).sum())
    print(f"{name}: largest {difference.max():.2f}, relative {relative:.2f}, {same} of {len(text)} greedy tokens kept")
    assert difference.max() > 50 * TOLERANCE
