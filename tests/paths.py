"""The golden model files."""

from pathlib import Path

REFS = Path(__file__).parent / "refs"
TINY = REFS / "model_tiny.kdtr"
V3 = REFS / "model_v3.kdtr"
