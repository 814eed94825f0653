"""The network of a DFlash drafter on one rank: it absorbs the target's features and drafts blocks of many sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn import functional

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

HEAD = 5  # columns of what is asked before the context rows


@dataclass(frozen=True)
class TargetPart:
    """What a drafter uses of its target, of one rank: embed [n, H] and head [H, n] of ids first .. first + n - 1."""

    embed: torch.Tensor
    head: torch.Tensor
    first: int


@dataclass(frozen=True)
class Block:
    """A block to draft: the newest token, which has no features yet, and the context rows of those before it, int64
    [start], in order of position. budget, depth: of its tree, if there is to be one, as in drafting.Root."""

    root: int
    rows: torch.Tensor
    budget: int = 0
    depth: int = 0


class Drafted(NamedTuple):
    """Candidates of B blocks: lp float32 [B, L, K] as in Marginals (version 1) or [B, L, K, K] as in Conditionals;
    ids int64 [B, L, K]."""

    lp: torch.Tensor
    ids: torch.Tensor

    def proposals(self) -> list[Marginals | Conditionals]:
        """Of each block."""
        kind = Marginals if self.lp.dim() == 3 else Conditionals
        return [kind(lp=lp, ids=ids) for lp, ids in zip(self.lp, self.ids, strict=True)]


class DFlash:
    """A drafter with a context of `rows` rows: keys and values of each layer for one token, wherever its user says.

    Only `absorb` writes there; a block's own keys and values are gone when it is drafted. Collectives inside: every
    rank makes the same calls. poison: NaN in rows not yet written, for tests. The folder is read whole; errors as
    Weights.
    """

    def __init__(
        self, folder: Path, config: DFlashConfig, target: TargetPart, comm: Comm, rows: int, poison: bool = False
    ) -> None:
        self.config, self._target, self.comm = config, target, comm
        dtype, device = target.embed.dtype, target.embed.device
        self.device = device
        with Weights(folder, config, comm.rank, comm.size, dtype, device) as weights:
            self._fc = weights.matrix("fc.weight")
            self._context_norm = Norm(weights.exact("hidden_norm.weight"), config.rms_norm_eps)
            self._layers = [layer(weights, comm, i) for i in range(config.num_hidden_layers)]
            self._norm = Norm(weights.exact("norm.weight"), config.rms_norm_eps)
            self._selector = _selector(weights) if config.version == 2 else None
        heads = config.num_key_value_heads // comm.size
        shape = (config.num_hidden_layers, 2, rows + 2, heads, config.head_dim)
        self._context = torch.full(shape, torch.nan if poison else 0.0, dtype=dtype, device=device)
        self._context[:, :, rows] = 0.0  # is read in place of rows that do not exist, and counts for nothing
        self.spare, self.sink = rows, rows + 1  # the sink is written in place of such rows, and never read
        self._frequencies = rope.frequencies(config.head_dim, config.rope_theta, config.rope_scaling).to(device)
        said = config.rope_amplitude
        self._amplitude = rope.amplitude(config.rope_scaling) if said is None else said

    @torch.inference_mode()
    def absorb(self, features: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
        """Take committed tokens into the context.

        features [N, taps * H]: the target's residual stream after each of config.target_layer_ids, side by side, of
        its dtype; positions, rows int64 [N].
        """
        width = self._fc.shape[0]
        part = features[:, self.comm.rank * width : (self.comm.rank + 1) * width]
        context = self._context_norm(self.comm.all_reduce(kernels.linear(part, self._fc)))
        angles = self._angles(positions)
        for layer_, kept in zip(self._layers, self._context, strict=True):
            kept[:, rows] = layer_.attention.keys_values(context, angles)

    @torch.inference_mode()
    def draft(self, blocks: Sequence[Block], k: int) -> Drafted:
        """Candidates for the block_size - 1 tokens after each root.

        Version 1 gives the k best of each depth; version 2 its config's selector_top_k, scored after one another.
        """
        return self.forward(self.gather(blocks).to(self.device), k)

    def gather(self, blocks: Sequence[Block], seqs: int = 0, width: int = 0) -> torch.Tensor:
        """Blocks as one tensor, int64 [B, HEAD + N], on the host: root, start, a first position, budget, depth, and the
        context row of each position from the first to the start; what is behind has no effect. Rows that no layer sees
        are left out.

        seqs, width: at least so many, with padding.
        """
        wide, many = max(width, self.reach(blocks)), max(seqs, len(blocks))
        asked = torch.full((many, HEAD + wide), self.spare, pin_memory=self.device.type == "cuda")
        table = asked.numpy()  # an assignment costs a fraction of torch's
        table[:, :HEAD] = 0
        for line, block in zip(table, blocks, strict=False):
            rows = block.rows.numpy()
            first = max(0, len(rows) - wide)
            line[:HEAD] = block.root, len(rows), first, block.budget, block.depth
            line[HEAD : HEAD + len(rows) - first] = rows[first:]
        return asked

    def reach(self, blocks: Sequence[Block]) -> int:
        """How many rows of context the layers see, of the longest."""
        longest, windows = max(block.rows.shape[0] for block in blocks), self.config.windows
        return min(longest, max(windows) - 1) if all(windows) else longest

    def forward(self, asked: torch.Tensor, k: int) -> Drafted:
        """As `draft`, of what was gathered, on the device: nothing in it waits for the host."""
        config, batch = self.config, len(asked)
        hidden = self._hidden(asked)[:, 1:].flatten(0, 1)
        top = self.candidates(k)
        found = best(self._logits(hidden), top, self._target.first, self.comm)
        ids = found.ids.view(batch, config.block_size - 1, top)
        if self._selector is None:
            return Drafted(log_probabilities(found).view(ids.shape), ids)
        return Drafted(self._selector(found, hidden, asked[:, 0]), ids)

    def candidates(self, k: int) -> int:
        """How many a depth has, if k are asked for."""
        return min(self.config.selector_top_k or k, self.config.vocab_size)

    def _hidden(self, asked: torch.Tensor) -> torch.Tensor:
        """Normed outputs of all slots, [B, n, H]."""
        config, n = self.config, self.config.block_size
        roots, starts, firsts = asked[:, :3].unbind(1)
        table = asked[:, HEAD:]
        ids = torch.full((len(roots), n), config.mask_token_id, device=self.device)
        ids[:, 0] = roots
        x = self.comm.all_reduce(kernels.embedding(ids.flatten(), self._target.embed, self._target.first))
        x = x * config.input_embedding_scale
        angles = self._angles((starts[:, None] + torch.arange(n, device=self.device)).flatten())
        kinds = list(zip(config.windows, config.causal, strict=True))
        views = {kind: _view(starts, firsts, table, self.spare, n, *kind) for kind in set(kinds)}
        for layer_, kept, kind in zip(self._layers, self._context, kinds, strict=True):
            x = layer_(x, angles, kept, views[kind])
        return self._norm(x).view(len(roots), n, -1)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, n] of this rank's ids."""
        logits = kernels.linear(hidden, self._target.head).float() * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return cap * (logits / cap).tanh() if cap else logits

    def _angles(self, positions: torch.Tensor) -> Angles:
        # In float64: beyond 2^24 / 10^3 positions a float32 angle is off by more than the rounding of a cosine.
        angles = positions.double()[:, None] * self._frequencies
        cos, sin = ((f(angles) * self._amplitude).float() for f in (torch.cos, torch.sin))
        return Angles(cos, sin)


def _view(
    starts: torch.Tensor, firsts: torch.Tensor, table: torch.Tensor, spare: int, n: int, window: int, causal: bool
) -> View:
    """What blocks of n slots at `starts` see: with a window, slots less than `window` away."""
    wide = min(table.shape[1], window - 1) if window else table.shape[1]  # of the context, what slot 0 may see
    at = starts[:, None] + torch.arange(-wide, 0, device=starts.device)  # position of each column
    there = at >= firsts[:, None]
    rows = table.gather(1, (at - firsts[:, None]).clamp(min=0)).where(there, spare)
    slots = torch.arange(n, device=starts.device)
    ahead = torch.arange(-wide, n, device=starts.device) - slots[:, None]  # of a query's position
    seen = ahead <= 0 if causal else torch.ones_like(ahead, dtype=torch.bool)
    if window:
        seen = seen & (ahead.abs() < window)
    return View(rows, seen & functional.pad(there, (0, n), value=True)[:, None])


def _selector(weights: Weights) -> Selector:
    at = "candidate_selector."
    before, after = (weights.take(f"{at}{side}_codebook") for side in ("predecessor", "successor"))
    return Selector(before, after, weights.matrix(f"{at}hidden_projection.weight"))
