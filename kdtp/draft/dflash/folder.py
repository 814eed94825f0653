"""A published DFlash drafter's folder: names and shapes of its parameters, how ranks split them. No torch here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

from kdtp.draft.dflash.config import DFlashConfig
from kdtp.model.weights.hf import open_shards
from kdtp.model.weights.safetensors import CheckpointError, File, Stored

_PREFIX = "model."
_DTYPES = ("BF16", "F16", "F32")
_ROTARY = re.compile(r"(.*\.)?rotary_emb\.\w+")  # computed from config.json
_SIDES = ("predecessor", "successor")


@dataclass(frozen=True)
class Param:
    """A parameter as stored, [out, in]; axis: the dimension that is cut into one part per rank (None: not cut)."""

    shape: tuple[int, ...]
    axis: int | None = None


def parameters(c: DFlashConfig) -> dict[str, Param]:
    """Every parameter by its published name."""
    table = {"fc.weight": Param((c.hidden_size, c.features), 1)}
    table |= {name: Param((c.hidden_size,)) for name in ("hidden_norm.weight", "norm.weight")}
    for i in range(c.num_hidden_layers):
        layer = _attention(c) | _mlp(c) | (_convolutions(c) if c.version == 2 else {})
        table |= {f"layers.{i}.{name}": param for name, param in layer.items()}
    return table | (_selector(c) if c.version == 2 else {})


def _attention(c: DFlashConfig) -> dict[str, Param]:
    hidden, queries, keys = c.hidden_size, c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    table = {f"self_attn.{name}_norm.weight": Param((c.head_dim,)) for name in "qk"}
    table |= {f"{name}_layernorm.weight": Param((hidden,)) for name in ("input", "post_attention")}
    for name, width in (("q", queries), ("k", keys), ("v", keys)):
        table[f"self_attn.{name}_proj.weight"] = Param((width, hidden), 0)
        if c.attention_bias:
            table[f"self_attn.{name}_proj.bias"] = Param((width,), 0)
    table["self_attn.o_proj.weight"] = Param((hidden, queries), 1)
    return table | ({"self_attn.o_proj.bias": Param((hidden,))} if c.attention_bias else {})


def _mlp(c: DFlashConfig) -> dict[str, Param]:
    wide = {f"mlp.{name}_proj.weight": Param((c.intermediate_size, c.hidden_size), 0) for name in ("gate", "up")}
    return wide | {"mlp.down_proj.weight": Param((c.hidden_size, c.intermediate_size), 1)}


def _convolutions(c: DFlashConfig) -> dict[str, Param]:
    table = {}
    for kind in ("attention", "mlp"):
        table[f"{kind}_conv.base_kernel"] = Param((2, c.conv_kernel_size, c.hidden_size))
        coefficients = 2 * c.conv_kernel_size * (c.hidden_size // c.conv_group_size)
        table[f"{kind}_conv.kernel_projection.weight"] = Param((coefficients, c.hidden_size))
    return table


def _selector(c: DFlashConfig) -> dict[str, Param]:
    books = {f"candidate_selector.{side}_codebook": (c.vocab_size, c.selector_rank) for side in _SIDES}
    shapes = books | {"candidate_selector.hidden_projection.weight": (c.selector_rank, c.hidden_size)}
    return {name: Param(shape) for name, shape in shapes.items()}


class Folder:
    """An open folder: `where` each parameter is. Raises CheckpointError unless every one is there in its shape and
    nothing else is."""

    def __init__(self, path: Path, config: DFlashConfig) -> None:
        self.path, self.config = path, config
        self.table = parameters(config)
        self._files = open_shards(path)
        self.where = self._by_name()
        for name, param in self.table.items():
            self._check(name, param)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files:
            file.close()

    def _by_name(self) -> dict[str, tuple[File, Stored]]:
        """Every parameter by its name without prefix."""
        found: dict[str, tuple[File, Stored]] = {}
        for file in self._files:
            for stored in file.tensors.values():
                name = stored.name.removeprefix(_PREFIX)
                if name in found:
                    _complain(file, stored, "name", "one of its kind", f"{found[name][1].name!r} too")
                if name in self.table:
                    found[name] = file, stored
                elif not _ROTARY.fullmatch(name):
                    _complain(file, stored, "name", f"a parameter of DFlash {self.config.version}", str(stored))
        return found

    def _check(self, name: str, param: Param) -> None:
        if name not in self.where:
            raise CheckpointError(f"{self.path}: tensor {name!r}: is missing")
        stored = self.where[name][1]
        if stored.shape != param.shape:
            self.complain(name, "shape", list(param.shape), list(stored.shape))
        if stored.dtype not in _DTYPES:
            self.complain(name, "dtype", " or ".join(_DTYPES), stored.dtype)

    def complain(self, name: str, what: str, want: object, found: object) -> NoReturn:
        """Raise the error of this form for a parameter."""
        _complain(*self.where[name], what, want, found)


def _complain(file: File, stored: Stored, what: str, want: object, found: object) -> NoReturn:
    raise CheckpointError(f"{file.path}: tensor {stored.name!r}: {what}: want {want}, found {found}")
