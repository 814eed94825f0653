"""`kdtp inspect`: what is in a KDTR file and whether it is whole, or what a published folder is and takes or fits."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kdtp import pair
from kdtp.cli import inspect_drafter, inspect_folder
from kdtp.cli.tables import printable, table
from kdtp.config import ConfigError, ModelConfig
from kdtp.draft.dflash import config as dflash
from kdtp.model.weights.kdtr import KdtrError, Reader
from kdtp.model.weights.safetensors import CheckpointError

_WIDEST_VALUE = 100  # characters of a metadata value in the plain form; --json has all


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add what the command takes."""
    parser.add_argument(
        "file", type=Path, help="a KDTR file, a folder as published of a model or of a DFlash drafter, or pair"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    inspect_folder.add_flags(parser)


def run(chosen: argparse.Namespace) -> int:
    """Print the file. A damaged one is code 1 and one line on stderr; its table is printed if that much is sound."""
    try:
        path = pair.TARGET if str(chosen.file) == pair.NAME else chosen.file
        if path.is_dir():
            drafter = dflash.is_one(path)
            return inspect_drafter.run(chosen, path) if drafter else inspect_folder.run(chosen, path)
        path.stat()  # one that is not there is neither
        inspect_folder.refuse_flags(chosen)
        with Reader(path) as reader:
            faults = _faults(reader)
            report = _report(reader, faults)
    except (KdtrError, CheckpointError, ConfigError) as error:
        return _refuse(str(error))
    except BrokenPipeError:  # of stdout
        raise
    except OSError as error:
        return _refuse(f"{error.filename or chosen.file}: {(error.strerror or str(error)).lower()}")
    print(json.dumps(report, indent=1, allow_nan=False) if chosen.json else "\n".join(_lines(report)))
    return _refuse(next(iter(faults.values()))) if faults else 0


def _refuse(text: str) -> int:
    print(f"kdtp inspect: {printable(text)}", file=sys.stderr)
    return 1


def _faults(reader: Reader) -> dict[str, str]:
    """By name, what is wrong with the data of an array."""
    faults = {}
    for name in reader.entries:
        try:
            reader.array(name)
        except KdtrError as error:
            faults[name] = str(error)
    return faults


def _report(reader: Reader, faults: dict[str, str]) -> dict[str, Any]:
    report: dict[str, Any] = {
        "file": str(reader.path),
        "bytes": reader.path.stat().st_size,
        "metadata": {key: _plain(value) for key, value in reader.metadata.items()},
        "arrays": [asdict(entry) | {"crc_ok": name not in faults} for name, entry in reader.entries.items()],
    }
    if reader.metadata.get("format") == "kdtp-model":
        report["model"] = _model(reader)
    return report


def _plain(value: Any) -> Any:
    """The value for JSON, which has no infinity and no NaN: those become strings."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _model(reader: Reader) -> dict[str, Any]:
    config = ModelConfig.from_metadata(reader.metadata, str(reader.path))
    sizes = {name: math.prod(entry.shape) for name, entry in reader.entries.items()}
    row = config.num_hidden_layers * config.kv_row
    return {
        "parameters": sum(size for name, size in sizes.items() if not name.startswith("golden.")),
        "layers": config.num_hidden_layers,
        "dense_layers": config.first_k_dense_replace,
        "legal_tp": config.legal_tp(),
        "kv_bytes_per_token": {"float32": 4 * row, "bfloat16": 2 * row},
        "golden_tokens": sizes.get("golden.tokens", 0),
    }


def _lines(report: dict[str, Any]) -> Iterable[str]:
    arrays = report["arrays"]
    counts = f"{report['bytes']} bytes, {len(report['metadata'])} values, {len(arrays)} arrays"
    yield f"{printable(report['file'])}: {counts}"
    yield from table("metadata", [(key, _short(value)) for key, value in report["metadata"].items()], "<<")
    rows = [("name", "dtype", "shape", "bytes", "offset", "crc32", "data")]
    for entry in arrays:
        state = "ok" if entry["crc_ok"] else "DAMAGED"
        form = (entry["name"], entry["dtype"], str(list(entry["shape"])))
        rows.append((*form, str(entry["nbytes"]), str(entry["offset"]), f"{entry['crc32']:08x}", state))
    yield from table("arrays", rows, "<<<>>><")
    if "model" in report:
        yield from table("model", _model_rows(report["model"]), "<<")


def _short(value: Any) -> str:
    text = printable(repr(value))
    return text if len(text) <= _WIDEST_VALUE else f"{text[:_WIDEST_VALUE]}… ({len(value)} in all)"


def _model_rows(model: dict[str, Any]) -> list[tuple[str, str]]:
    kv = model["kv_bytes_per_token"]
    return [
        ("parameters", f"{model['parameters']:,}"),
        ("layers", f"{model['layers']}, the first {model['dense_layers']} dense"),
        ("legal --tp", " ".join(map(str, model["legal_tp"]))),
        ("KV per token", f"{kv['float32']} bytes in float32, {kv['bfloat16']} in bfloat16, on every rank"),
        ("golden tokens", str(model["golden_tokens"] or "none")),
    ]
