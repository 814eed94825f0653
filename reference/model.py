"""The whole network behind its one entry, `forward_tokens`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from reference import mla
from reference.arith import linear
from reference.cache import Cache
from reference.config import ModelConfig
from reference.moe import moe, swiglu
from reference.norm import rms_norm


@dataclass(frozen=True)
class Model:
    """A configuration and its weights: name -> float32 array, row-major, y = x @ W with W [in, out]."""

    config: ModelConfig
    weights: Mapping[str, np.ndarray]

    def layer(self, i: int) -> dict[str, np.ndarray]:
        """The weights of layer i, without their prefix."""
        prefix = f"layers.{i}."
        return {name.removeprefix(prefix): w for name, w in self.weights.items() if name.startswith(prefix)}

    def forward_tokens(
        self, tokens: Sequence[int], positions: Sequence[int], mask: np.ndarray, cache: Cache
    ) -> np.ndarray:
        """Run M tokens at their positions and return logits float32 [M, V].

        Their KV goes to the cache rows after the committed ones; row i sees column j of bool mask
        [M, cache.length + M] where it is True. Prefill is a causal chunk, plain decoding one token, verification a
        tree.
        """
        assert mask.shape == (len(tokens), cache.length + len(tokens)), (mask.shape, cache.length)
        eps = self.config.rms_norm_eps
        x = self.weights["embed"][np.asarray(tokens, np.int64)]
        for i in range(self.config.num_hidden_layers):
            w = self.layer(i)
            x = x + self.attention(i, w, rms_norm(x, w["attn_norm"], eps), positions, mask, cache)
            x = x + self.mlp(i, w, rms_norm(x, w["mlp_norm"], eps))
        return linear(rms_norm(x, self.weights["final_norm"], eps), self.weights["head"])

    def attention(
        self,
        i: int,
        w: Mapping[str, np.ndarray],
        x: np.ndarray,
        positions: Sequence[int],
        mask: np.ndarray,
        cache: Cache,
    ) -> np.ndarray:
        """Write the KV rows of x [M, H], attend, project: [M, H]."""
        rows = cache.write(i, mla.kv_rows(self.config, w, x, positions))
        heads = mla.attend(self.config, w, *mla.queries(self.config, w, x, positions), rows, mask)
        return linear(heads.reshape(len(x), -1), w["w_o"])

    def mlp(self, i: int, w: Mapping[str, np.ndarray], x: np.ndarray) -> np.ndarray:
        """Dense in the first `first_k_dense_replace` layers, experts in the others: [M, H] -> [M, H]."""
        if i < self.config.first_k_dense_replace:
            return swiglu(x, w["w_gate"], w["w_up"], w["w_down"])
        return moe(self.config, w, x)
