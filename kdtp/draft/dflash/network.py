"""The network of a DFlash drafter on one rank: it absorbs the target's features and drafts blocks of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kdtp import kernels
from kdtp.draft.dflash.config import DFlashConfig
from kdtp.draft.dflash.layers import Angles, View, layer
from kdtp.draft.dflash.select import Selector, best, log_probabilities
from kdtp.draft.dflash.weights import Weights
from kdtp.model import rope
from kdtp.model.layers import Norm
from kdtp.proposals import Conditionals, Marginals

if TYPE_CHECKING:
    from kdtp.model.comm import Comm


@dataclass(frozen=True)
class TargetPart:
    """What a drafter uses of its target, of one rank: embed [n, H] and head [H, n] of ids first .. first + n - 1."""

    embed: torch.Tensor
    head: torch.Tensor
    first: int


@dataclass(frozen=True)
class Block:
    """A block to draft: the newest token, which has no features yet, and the context rows of those before it, int64
    [start], in order of position."""

    root: int
    rows: torch.Tensor


class DFlash:
    """A drafter with a context of `rows` rows: keys and values of each layer for one token, wherever its user says.

    Only `absorb` writes there; a block's own keys and values are gone when it is drafted. Collectives inside: every
    rank makes the same calls. poison: NaN in rows not yet written, for tests. The folder is read whole; errors as
    Weights.
    """

    def __init__(
        self, folder: Path, config: DFlashConfig, target: TargetPart, comm: Comm, rows: int, poison: bool = False
    ) -> None:
        self.config, self._target, self._comm = config, target, comm
        dtype, device = target.embed.dtype, target.embed.device
        with Weights(folder, config, comm.rank, comm.size, dtype, device) as weights:
            self._fc = weights.matrix("fc.weight")
            self._context_norm = Norm(weights.exact("hidden_norm.weight"), config.rms_norm_eps)
            self._layers = [layer(weights, comm, i) for i in range(config.num_hidden_layers)]
            self._norm = Norm(weights.exact("norm.weight"), config.rms_norm_eps)
            self._selector = _selector(weights) if config.version == 2 else None
        heads = config.num_key_value_heads // comm.size
        shape = (config.num_hidden_layers, 2, rows, heads, config.head_dim)
        self._context = torch.full(shape, torch.nan if poison else 0.0, dtype=dtype, device=device)
        self._frequencies = rope.frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        said = config.rope_amplitude
        self._amplitude = rope.amplitude(config.rope_scaling) if said is None else said

    @torch.inference_mode()
    def absorb(self, features: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
        """Take committed tokens into the context.

        features [N, taps * H]: the target's residual stream after each of config.target_layer_ids, side by side, of
        its dtype; positions, rows int64 [N].
        """
        width = self._fc.shape[0]
        part = features[:, self._comm.rank * width : (self._comm.rank + 1) * width]
        context = self._context_norm(self._comm.all_reduce(kernels.linear(part, self._fc)))
        angles = self._angles(positions)
        for layer_, kept in zip(self._layers, self._context, strict=True):
            kept[:, rows] = layer_.attention.keys_values(context, angles)

    @torch.inference_mode()
    def draft(self, blocks: Sequence[Block], depth: int, k: int) -> Sequence[Marginals | Conditionals]:
        """Candidates for the `depth` tokens after each root, at most block_size - 1.

        Version 1 gives the k best of each depth; version 2 its config's selector_top_k, scored after one another.
        """
        hidden = self._hidden(blocks)[:, 1 : depth + 1].flatten(0, 1)
        top = min(self.config.selector_top_k or k, self.config.vocab_size)
        found = best(self._logits(hidden), top, self._target.first, self._comm)
        ids = found.ids.view(len(blocks), -1, top)
        if self._selector is None:
            lp = log_probabilities(found).view(ids.shape)
            return [Marginals(lp=each, ids=own) for each, own in zip(lp, ids, strict=True)]
        roots = torch.tensor([block.root for block in blocks], device=hidden.device)
        scores = self._selector(found, hidden, roots)
        return [Conditionals(lp=each, ids=own) for each, own in zip(scores, ids, strict=True)]

    def _hidden(self, blocks: Sequence[Block]) -> torch.Tensor:
        """Normed outputs of all slots, [B, n, H]."""
        config, device = self.config, self._context.device
        n = config.block_size
        tokens = [token for block in blocks for token in (block.root, *[config.mask_token_id] * (n - 1))]
        ids = torch.tensor(tokens, device=device)
        x = self._comm.all_reduce(kernels.embedding(ids, self._target.embed, self._target.first))
        x = x * config.input_embedding_scale
        slots = torch.arange(n, device=device)
        angles = self._angles(torch.cat([len(block.rows) + slots for block in blocks]))
        kinds = list(zip(config.windows, config.causal, strict=True))
        views = {kind: [_view(block.rows, n, *kind) for block in blocks] for kind in set(kinds)}
        for layer_, kept, kind in zip(self._layers, self._context, kinds, strict=True):
            x = layer_(x, angles, kept, views[kind])
        return self._norm(x).view(len(blocks), n, -1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, n] of this rank's ids."""
        logits = kernels.linear(hidden, self._target.head).float() * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return cap * (logits / cap).tanh() if cap else logits

    def _angles(self, positions: torch.Tensor) -> Angles:
        # In float64: beyond 2^24 / 10^3 positions a float32 angle is off by more than the rounding of a cosine.
        angles = positions.cpu().double()[:, None, None] * self._frequencies
        device = self._context.device
        cos, sin = ((f(angles) * self._amplitude).float().to(device) for f in (torch.cos, torch.sin))
        return Angles(cos, sin)


def _view(rows: torch.Tensor, n: int, window: int, causal: bool) -> View:
    """What a block of n slots behind `rows` sees: with a window, slots less than `window` away."""
    start = len(rows)
    first = max(0, start - window + 1) if window else 0  # of the context, what slot 0 sees
    if not causal and (not window or start + n - first <= window):
        return View(rows[first:], None)
    slots = torch.arange(start, start + n, device=rows.device)[:, None]
    ahead = torch.arange(first, start + n, device=rows.device) - slots  # of a query's position
    mask = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    return View(rows[first:], mask & (ahead.abs() < window) if window else mask)


def _selector(weights: Weights) -> Selector:
    at = "candidate_selector."
    before, after = (weights.take(f"{at}{side}_codebook") for side in ("predecessor", "successor"))
    return Selector(before, after, weights.matrix(f"{at}hidden_projection.weight"))
