"""A folder as published: config.json and safetensors shards, every tensor of them accounted for. No torch here.

Everything but the values is checked when the folder is opened: which tensors there are, where, of which shape, dtype
and form. Complaints name file, tensor, what is expected and what was found.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Self

import numpy as np

from kdtp.config import ModelConfig
from kdtp.log import amount
from kdtp.model.weights import hf_config, hf_table
from kdtp.model.weights.hf_config import Fp8, HfConfig, Int4
from kdtp.model.weights.hf_table import Origin
from kdtp.model.weights.safetensors import CheckpointError, File, Rows, Stored

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_PREFIX = "language_model."  # of a wrapped model's text part
_PLAIN = ("BF16", "F16", "F32")
# What a text model has no use for, by the start of its name without prefix.
_VISION = {"vision_tower.": "vision tower", "mm_projector.": "vision projector"}
_ROTARY = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
# A file of the same folder, of a length that file systems have.
_SHARD = re.compile(r"[^/\\]{1,200}\.safetensors")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Skipped:
    """Tensors of a kind that are not loaded."""

    what: str
    tensors: int
    nbytes: int

    def __str__(self) -> str:
        return f"{self.what} ({self.tensors} tensors, {amount(self.nbytes)})"


class Checkpoint:
    """An open model folder. Raises ConfigError or CheckpointError unless all of it is sound.

    origins: by parameter of weights.table, where its values are.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.config: HfConfig = hf_config.read(folder)
        self.model: ModelConfig = self.config.model
        self._files = open_shards(folder)
        self._where = self._by_name()
        self.origins = hf_table.origins(self.model, self.config.tied)
        used = {name for group in self.origins.values() for origin in group for name in self._checked(origin)}
        self.skipped = self._account(used)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget the mappings."""
        for file in self._files:
            file.close()

    @property
    def model_hash(self) -> str:
        """sha256 of configuration, shard names and headers: of all but the values, which are too many to read."""
        tensors = [
            [f.path.name, f.size, t.name, t.dtype, t.shape, t.offset] for f in self._files for t in f.tensors.values()
        ]
        return hashlib.sha256(json.dumps([repr(self.config), tensors]).encode()).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of all shards."""
        return sum(file.size for file in self._files)

    @property
    def quantized(self) -> list[str]:
        """Which of FP8 and INT4 there are."""
        return sorted(self.forms.keys() & {"FP8", "INT4"})

    @property
    def forms(self) -> Counter[str]:
        """Bytes of tensor data by dtype, skipped tensors left out; INT4 and FP8 with their scales."""
        found: Counter[str] = Counter()
        for origin in {o.tensor: o for group in self.origins.values() for o in group}.values():
            form = {"int4": "INT4", "fp8": "FP8"}.get(self.form(origin)) or self.stored(origin.tensor).dtype
            found[form] += sum(self.stored(name).nbytes for name in self.parts(origin))
        return found

    def legal_tp(self, int4_inputs: int = Int4.GROUP) -> list[int]:
        """As ModelConfig.legal_tp; a rank's share of an INT4 matrix must also be a multiple of so many inputs."""
        packed = [o for group in self.origins.values() for o in group if self.form(o) == "int4"]
        widths = {(origin.shape[1], origin.cut == "columns") for origin in packed}
        return [
            n
            for n in self.model.legal_tp()
            if all(width % ((n if cut else 1) * int4_inputs) == 0 for width, cut in widths)
        ]

    def form(self, origin: Origin) -> str:
        """How its values are stored: "plain", "fp8" or "int4"."""
        if origin.linear and _packed(origin) in self._where:
            return "int4"
        return "fp8" if origin.linear and self.stored(origin.tensor).dtype == "F8_E4M3" else "plain"

    def parts(self, origin: Origin) -> tuple[str, ...]:
        """Names of the tensors that hold its values."""
        if self.form(origin) == "int4":
            return tuple(f"{_base(origin)}.weight_{part}" for part in ("packed", "scale", "shape"))
        return (origin.tensor, *((f"{origin.tensor}_scale_inv",) if self.form(origin) == "fp8" else ()))

    def nbytes_of(self, origin: Origin, rank: int, size: int) -> int:
        """Bytes that a rank reads for an origin."""
        rows, columns = origin.rows(rank, size), origin.columns(rank, size)
        taken = int(rows.stop - rows.start) if isinstance(rows, slice) else len(rows)
        share = taken * int(columns.stop - columns.start)
        stored = sum(self.stored(part).nbytes for part in self.parts(origin))
        return stored * share // math.prod(origin.shape)

    def stored(self, name: str) -> Stored:
        """A tensor's place and form; CheckpointError if there is none."""
        if name not in self._where:
            raise CheckpointError(f"{self.path}: tensor {self._named(name)!r}: is missing")
        return self._where[name][1]

    def read(self, name: str, rows: Rows = slice(None), columns: slice = slice(None)) -> np.ndarray:
        """As File.read, by the name without prefix."""
        file, stored = self._where[name]
        return file.read(stored.name, rows, columns)

    def complain(self, name: str, what: str, want: object, found: object) -> NoReturn:
        """Raise the error of this form for a tensor."""
        file, stored = self._where[name]
        raise CheckpointError(f"{file.path}: tensor {stored.name!r}: {what}: want {want}, found {found}")

    def _named(self, name: str) -> str:
        return _PREFIX + name if self.config.wrapped else name

    def _by_name(self) -> dict[str, tuple[File, Stored]]:
        """Every tensor by its name without prefix."""
        found: dict[str, tuple[File, Stored]] = {}
        for file in self._files:
            for stored in file.tensors.values():
                name = stored.name.removeprefix(_PREFIX) if self.config.wrapped else stored.name
                if name in found:
                    other = found[name][0].path.name
                    raise CheckpointError(f"{file.path}: tensor {stored.name!r}: is in {other} too")
                found[name] = file, stored
        return found

    def _checked(self, origin: Origin) -> tuple[str, ...]:
        """Names of an origin's tensors, once their dtypes and shapes are what they must be."""
        form, quantization = self.form(origin), self.config.quantization
        if form == "int4":
            if not isinstance(quantization, Int4):
                self.complain(_packed(origin), "INT4", "a quantization_config of compressed-tensors", "none such")
            self._check_int4(origin)
        elif form == "fp8":
            if not isinstance(quantization, Fp8):
                self.complain(origin.tensor, "FP8", "a quantization_config of quant_method fp8", "none such")
            rows, columns = origin.shape
            grid = (-(-rows // quantization.rows), -(-columns // quantization.columns))
            self._want(origin.tensor, ("F8_E4M3",), origin.shape)
            self._want(f"{origin.tensor}_scale_inv", ("F32",), grid)
        else:
            self._want(origin.tensor, _PLAIN, origin.shape)
        return self.parts(origin)

    def _check_int4(self, origin: Origin) -> None:
        (out, inputs), (packed, scale, shape) = origin.shape, self.parts(origin)
        if inputs % Int4.GROUP:
            self.complain(packed, "group size", f"a divisor of {inputs} inputs", Int4.GROUP)
        self._want(packed, ("I32",), (out, inputs // 8))
        groups = self.stored(scale).shape
        if len(groups) == 2 and groups[0] == out and 0 < groups[1] != inputs // Int4.GROUP:
            self.complain(scale, "group size", Int4.GROUP, f"{inputs / groups[1]:g} ({self.stored(scale)})")
        self._want(scale, ("BF16",), (out, inputs // Int4.GROUP))
        self._want(shape, ("I32", "I64"), (2,))

    def _want(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...]) -> None:
        found = self.stored(name)
        if found.shape != shape:
            self.complain(name, "shape", list(shape), list(found.shape))
        if found.dtype not in dtypes:
            self.complain(name, "dtype", " or ".join(dtypes), found.dtype)

    def _account(self, used: set[str]) -> list[Skipped]:
        """What is skipped; CheckpointError for a tensor that nothing accounts for."""
        count: Counter[str] = Counter()
        size: Counter[str] = Counter()
        unknown = []
        for name, (_, stored) in self._where.items():
            if name in used:
                continue
            what = self._skip(name)
            if what is None:
                unknown.append(name)
            else:
                count[what] += 1
                size[what] += stored.nbytes
        if unknown:
            file, stored = self._where[unknown[0]]
            raise CheckpointError(
                f"{file.path}: tensor {stored.name!r} ({stored}) is no parameter of this model ({len(unknown)} such)"
            )
        return [Skipped(what, count[what], size[what]) for what in count]

    def _skip(self, name: str) -> str | None:
        """What a tensor that is not loaded belongs to."""
        layer, layers = _LAYER.match(name), self.model.num_hidden_layers
        if layer and layers <= int(layer[1]) < layers + self.config.mtp_layers:
            return f"multi-token prediction layer {layer[1]}"
        if _ROTARY.fullmatch(name):
            return "rotary frequencies"
        vision = _VISION if self.config.wrapped else {}
        return next((what for prefix, what in vision.items() if name.startswith(prefix)), None)


def _base(origin: Origin) -> str:
    return origin.tensor.removesuffix(".weight")


def _packed(origin: Origin) -> str:
    return f"{_base(origin)}.weight_packed"


def open_shards(folder: Path) -> list[File]:
    """All shards: those that the index names, or the only one."""
    index = folder / INDEX
    if not os.path.lexists(index):
        only = File(folder / SINGLE)
        _nothing_beside(folder, {SINGLE}, f"this folder has no {INDEX}")
        return [only]
    weight_map = hf_config.load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map: want tensors and their files, found {str(weight_map)[:100]}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _SHARD.fullmatch(shard) or not shard.isprintable():
            found = str(shard)[:100]
            raise CheckpointError(f"{index}: tensor {name!r}: want a .safetensors file of this folder, found {found!r}")
    files = {shard: File(folder / shard) for shard in sorted(set(weight_map.values()))}
    for complaint in _stale(index, weight_map, files):
        raise CheckpointError(complaint)
    _nothing_beside(folder, set(files), f"{INDEX} does not name it (is it stale?)")
    return list(files.values())


def _nothing_beside(folder: Path, shards: set[str], why: str) -> None:
    """Refuse what looks like a shard of the model and is none; files of other names are nobody's business."""
    for name in sorted(path.name for path in folder.glob("model*.safetensors")):
        if name not in shards:
            raise CheckpointError(f"{folder / name}: want it among the shards of the model, found that {why}")


def _stale(index: Path, weight_map: dict[str, str], files: dict[str, File]) -> Iterator[str]:
    """Where index and shards disagree."""
    holder = {name: shard for shard, file in files.items() for name in file.tensors}
    for name, shard in weight_map.items():
        if name not in files[shard].tensors:
            found = holder.get(name, "no shard")
            yield f"{index}: tensor {name!r}: want it in {shard}, found it in {found} (is the index stale?)"
    for file in files.values():
        for name in file.tensors:
            if name not in weight_map:
                yield f"{file.path}: tensor {name!r}: want it in {INDEX}, found it only here (is the index stale?)"
