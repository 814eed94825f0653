"""Compile the CUDA kernels, as `kdtp build-kernels` does: python scripts/build_kernels.py [--jobs N] [--selftest]."""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kdtp.cli import build_kernels

parser = argparse.ArgumentParser(description=__doc__)
build_kernels.add_flags(parser)
sys.exit(build_kernels.run(parser.parse_args()))
