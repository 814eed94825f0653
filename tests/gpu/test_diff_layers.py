"""Every stage of the CUDA forward against the reference, one op by one."""

from __future__ import annotations

import numpy as np
import pytest

from kdtp.model.weights import kdtr
from reference.config import from_metadata
from scripts.diff_layers import TOLERANCE, diff, parting
from scripts.layer_stages import stages
from tests.paths import TINY, V3


@pytest.mark.parametrize("path", [TINY, V3], ids=lambda path: path.stem)
def test_no_stage_parts_in_float32(path, cuda):
    with kdtr.Reader(path) as reader:
        prompt, config = reader.array("golden.prompt").tolist(), from_metadata(reader.metadata)
    lines = diff(path, path, prompt, "head", "float32", cuda)
    assert [line.stage for line in lines] == stages(config)
    assert parting(lines, TOLERANCE["float32"]) is None
    assert np.isfinite([line.cosine for line in lines]).all()
