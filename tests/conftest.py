"""Shared by all tests: the repository root is importable, so that tests can use `reference` and `scripts`."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
