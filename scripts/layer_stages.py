"""The stages of a forward, told as they come by the reference and by the engine: what diff_layers.py compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from kdtp import kernels
from kdtp.model.comm import Solo
from kdtp.model.layers import Mlp, Norm
from kdtp.model.mla import Mla
from kdtp.model.moe import Moe
from kdtp.model.shard import Shard
from kdtp.model.weights import kdtr
from kdtp.types import PAGE_ROWS, SeqRows
from reference import mla, moe
from reference.arith import linear, vecmat
from reference.cache import Cache
from reference.config import ModelConfig, from_metadata
from reference.model import Model

Tell = Callable[[str, Any], None]  # a stage and its values


def stages(config: ModelConfig) -> list[str]:
    """All stages of a model, in order."""
    before = ("attn_norm", "kv", "queries", "heads", "attn", "mlp_norm")
    found = ["embed"]
    for i in range(config.num_hidden_layers):
        rest = ("mlp",) if i < config.first_k_dense_replace else ("router", "experts", "moe")
        found += [f"{i}.{name}" for name in before + rest]
    return [*found, "head"]


@dataclass(frozen=True)
class Traced(Model):
    """The reference, telling its stages; what it computes is Model's."""

    tell: Tell

    def attention(
        self, i: int, w: Any, x: np.ndarray, positions: Sequence[int], mask: np.ndarray, cache: Cache
    ) -> np.ndarray:
        """As Model."""
        self.tell(f"{i}.attn_norm", x)
        rows = cache.write(i, mla.kv_rows(self.config, w, x, positions))
        self.tell(f"{i}.kv", rows[cache.length :])
        nope, rope = mla.queries(self.config, w, x, positions)
        self.tell(f"{i}.queries", np.concatenate([np.stack([vecmat(row, w["w_kc"]) for row in nope]), rope], -1))
        heads = mla.attend(self.config, w, nope, rope, rows, mask)
        self.tell(f"{i}.heads", heads)
        out = linear(heads.reshape(len(x), -1), w["w_o"])
        self.tell(f"{i}.attn", out)
        return out

    def mlp(self, i: int, w: Any, x: np.ndarray) -> np.ndarray:
        """As Model."""
        self.tell(f"{i}.mlp_norm", x)
        sparse = i >= self.config.first_k_dense_replace
        if sparse:
            self._routing(i, w, x)
        out = super().mlp(i, w, x)
        self.tell(f"{i}.moe" if sparse else f"{i}.mlp", out)
        return out

    def _routing(self, i: int, w: Any, x: np.ndarray) -> None:
        logits = np.stack([vecmat(token, w["router"]) for token in x])
        self.tell(f"{i}.router", logits)
        routed = [moe.route(self.config, row, w.get("router_bias")) for row in logits]
        ids, weights = (np.stack(part) for part in zip(*routed, strict=True))
        self.tell(f"{i}.experts", spread_out(ids, weights, self.config.n_routed_experts))


def spread_out(ids: np.ndarray, weights: np.ndarray, experts: int) -> np.ndarray:
    """Weights [M, k] of experts [M, k] -> [M, E], 0 where an expert is not chosen."""
    whole = np.zeros((len(ids), experts), np.float32)
    np.put_along_axis(whole, ids.astype(np.int64), weights, 1)
    return whole


def run_reference(path: Path, prompt: Sequence[int], tell: Tell) -> None:
    """The prompt through the reference with the weights of a KDTR file, as one causal chunk."""
    with kdtr.Reader(path) as reader:
        names = [name for name in reader.entries if not name.startswith("golden.")]
        config = from_metadata(reader.metadata)
        model = Traced(config, {name: reader.array(name) for name in names}, tell)
        tell("embed", model.weights["embed"][np.asarray(prompt, np.int64)])
        mask = np.tri(len(prompt), dtype=bool)
        tell("head", model.forward_tokens(prompt, range(len(prompt)), mask, Cache(config, len(prompt))))


def run_engine(path: Path, prompt: Sequence[int], dtype: str, device: torch.device, tell: Tell) -> None:
    """The same through one rank of the engine."""
    pages = -(-len(prompt) // PAGE_ROWS)
    shard = Shard.load(str(path), Solo(), dtype, pages, lambda done, total: None, device)
    count = len(prompt)
    rows = SeqRows(0, 0, tuple(prompt), tuple(range(-1, count - 1)), count, tuple(range(pages)))

    def told(stage: str, values: torch.Tensor) -> None:
        tell(stage, values[:count].float().cpu().numpy())  # rows behind these are padding

    with watched(shard, told):
        told("head", shard.forward_tokens([rows]))


@contextmanager
def watched(shard: Shard, tell: Tell) -> Iterator[None]:
    """Within it the shard tells its stages, tensors of at least as many rows as the batch has."""
    watch = Watch(shard, tell)
    with ExitStack() as stack:
        for owner, name, taking in watch.patches():
            stack.enter_context(patch.object(owner, name, taking(getattr(owner, name))))
        yield


class Watch:
    """What stands before the parts of a shard, known by their identity, and before the ops within them."""

    def __init__(self, shard: Shard, tell: Tell) -> None:
        self._tell, self._layer, self._experts = tell, -1, shard.config.n_routed_experts
        self._names: dict[int, tuple[int, str]] = {}
        for i, layer in enumerate(shard._layers):
            last = "moe" if isinstance(layer.mlp, Moe) else "mlp"
            parts = {"attn_norm": layer.attn_norm, "attn": layer.attention, "heads": layer.attention.w_vc}
            parts |= {"mlp_norm": layer.mlp_norm, last: layer.mlp}
            self._names |= {id(part): (i, name) for name, part in parts.items()}

    def patches(self) -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
        """What to replace: owner, name, and what makes the replacement of the original."""
        yield Norm, "add", self._part(lambda result: result[1])
        for kind in (Mla, Moe, Mlp):
            yield kind, "__call__", self._part(lambda result: result)
        yield kernels, "embedding", self._op(lambda inputs, result: self._tell("embed", result))
        yield kernels, "mla_tree", self._op(self._attention)
        yield kernels, "linear_heads", self._op(self._heads)
        yield kernels, "router", self._op(self._routing)

    def _part(self, values: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def taking(original: Any) -> Any:
            def call(part: Any, *inputs: Any) -> Any:
                known = self._names.get(id(part))
                if known is None:
                    return original(part, *inputs)
                self._layer = known[0]
                result = original(part, *inputs)
                self._tell(f"{known[0]}.{known[1]}", values(result))
                return result

            return call

        return taking

    def _op(self, told: Callable[[Any, Any], None]) -> Callable[[Any], Any]:
        def taking(original: Any) -> Any:
            def call(*inputs: Any) -> Any:
                result = original(*inputs)
                told(inputs, result)
                return result

            return call

        return taking

    def _attention(self, inputs: Any, result: Any) -> None:
        # All pages are the one sequence's, in order: rows lie in the cache as in the text.
        self._tell(f"{self._layer}.kv", inputs[1])
        self._tell(f"{self._layer}.queries", inputs[0])

    def _heads(self, inputs: Any, result: Any) -> None:
        if id(inputs[1]) in self._names:
            self._tell(f"{self._layer}.heads", result)

    def _routing(self, inputs: Any, result: Any) -> None:
        self._tell(f"{self._layer}.router", inputs[0])
        ids, weights = (part.cpu().numpy() for part in result)
        self._tell(f"{self._layer}.experts", torch.from_numpy(spread_out(ids, weights, self._experts)))
