"""Training of the target: next tokens of random stretches of text."""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from kdtp.config import ConfigError
from kdtp.train.config import TargetTrain
from kdtp.train.loop import precision
from kdtp.train.target import Target

_HELD_OUT = 128  # stretches at most


class Text:
    """Tokens on a device. Every stretch begins with the token `begin`, as a prompt does, wherever it is from."""

    def __init__(self, ids: NDArray[np.uint16], begin: int, device: torch.device) -> None:
        self._ids, self._begin, self.device = torch.from_numpy(ids.astype(np.int32)).to(device), begin, device

    def __len__(self) -> int:
        return len(self._ids)

    def drawn(self, count: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Stretches at random places: tokens, and those that follow each, int64 [count, length]."""
        return self._stretches(torch.randint(self._places(length), (count,), generator=generator), length)

    def spread(self, most: int, length: int) -> tuple[Tensor, Tensor]:
        """At most so many, side by side or evenly spread."""
        places = self._places(length)
        count = min(most, max(1, (len(self) - 1) // length))
        return self._stretches(torch.arange(count) * (places - 1) // max(1, count - 1), length)

    def _places(self, length: int) -> int:
        places = len(self) - length
        if places < 1:
            raise ConfigError(f"train.seq = {length}: must be below {len(self)}, the tokens there are of this text")
        return places

    def _stretches(self, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
        places = starts.to(self.device)[:, None] + torch.arange(length + 1, device=self.device)
        rows = self._ids[places].long()
        tokens = rows[:, :-1].clone()
        tokens[:, 0] = self._begin
        return tokens, rows[:, 1:]


class TargetJob:
    """As loop.Job. bytes_per_token: of the held-out text, for a figure that does not depend on the vocabulary."""

    def __init__(self, target: Target, train: TargetTrain, text: Text, held_out: Text, bytes_per_token: float) -> None:
        self.module, self._target, self._train = target, target, train
        self._text, self.device = text, text.device
        self.tokens = train.batch * train.seq
        self._held_out = held_out.spread(_HELD_OUT, train.seq)
        self._bytes_per_token = bytes_per_token
        text.spread(1, train.seq)  # refuses a text that is too short before anything is trained

    def loss(self, generator: torch.Generator) -> Tensor:
        """As loop.Job."""
        return self._loss(*self._text.drawn(self._train.batch, self._train.seq, generator))

    def after_step(self) -> None:
        """As loop.Job."""
        for gate in self._target.gates:
            gate.rebalance(self._train.balance)

    def evaluate(self) -> dict[str, float]:
        """loss: nats per token. busiest_expert: of all layers, how often it is chosen, in parts of the mean."""
        parts = zip(*(torch.split(part, self._train.batch) for part in self._held_out), strict=True)
        losses = [(self._loss(tokens, after), len(tokens)) for tokens, after in parts]
        loss = float(sum(loss * count for loss, count in losses)) / sum(count for _, count in losses)
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 50.0)),
            "bits_per_byte": loss / math.log(2) / self._bytes_per_token,
            "busiest_expert": max(
                (float(gate.load.max() / gate.load.mean()) for gate in self._target.gates), default=1.0
            ),
        }

    def _loss(self, tokens: Tensor, after: Tensor) -> Tensor:
        with precision(self.device):
            hidden, _ = self._target.hidden(tokens)
            logits = self._target.logits(hidden)
        return functional.cross_entropy(logits.flatten(0, 1), after.flatten())
