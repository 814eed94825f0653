"""`kdtp inspect DIR` of a DFlash drafter: what it is, and the targets that it is for."""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kdtp.cli import inspect_folder
from kdtp.cli.tables import printable, table
from kdtp.draft.dflash import config as dflash
from kdtp.draft.dflash.folder import Folder
from kdtp.log import amount


def run(chosen: argparse.Namespace, path: Path) -> int:
    """Print the folder's report. ConfigError or CheckpointError if it cannot be loaded."""
    inspect_folder.refuse_flags(chosen)
    with Folder(path, dflash.read(path)) as folder:
        found = report(folder)
    print(json.dumps(found, indent=1) if chosen.json else "\n".join(_lines(found)))
    return 0


def report(folder: Folder) -> dict[str, Any]:
    """All that is said of a drafter. target: what a model must be, for it to fit; layers 0: any number."""
    config, stored = folder.config, [folder.where[name][1] for name in folder.table]
    forms: Counter[str] = Counter()
    for tensor in stored:
        forms[tensor.dtype] += tensor.nbytes
    return {
        "folder": str(folder.path),
        "version": config.version,
        "bytes": sum(forms.values()),
        "parameters": sum(math.prod(tensor.shape) for tensor in stored),
        "layers": config.num_hidden_layers,
        "windows": list(config.windows),
        "block": config.block_size,
        "mask_token": config.mask_token_id,
        "stored_as": dict(sorted(forms.items())),
        "legal_tp": config.legal_tp(),
        "target": {
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "layers": config.num_target_layers,
            "read": list(config.target_layer_ids),
        },
    }


def _lines(found: dict[str, Any]) -> Iterable[str]:
    yield f"{printable(found['folder'])}: DFlash {found['version']}, {amount(found['bytes'])}"
    target = found["target"]
    windows = {"all" if window == 0 else f"{window} tokens" for window in found["windows"]}
    rows = [
        ("parameters", f"{found['parameters']:,}"),
        ("layers", f"{found['layers']}, which see {' or '.join(sorted(windows))} of the text"),
        ("block", f"{found['block']}: the newest token, and {found['block'] - 1} that it drafts"),
        ("mask token", str(found["mask_token"])),
        ("stored as", ", ".join(f"{form} {amount(nbytes)}" for form, nbytes in found["stored_as"].items())),
        ("legal --tp", " ".join(map(str, found["legal_tp"]))),
    ]
    yield from table("drafter", rows, "<<")
    rows = [
        ("hidden size", str(target["hidden_size"])),
        ("vocabulary", f"{target['vocab_size']} tokens"),
        ("layers", f"{target['layers'] or 'any number'}; it reads behind {', '.join(map(str, target['read']))}"),
    ]
    yield from table("its target", rows, "<<")
