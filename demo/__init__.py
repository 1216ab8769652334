"""The whole workflow on a real checkpoint: upscale, train, evaluate, strip, report. Not part of the distribution."""

import sys
from pathlib import Path

BIN = Path(sys.executable).parent
CONFIGS = Path(__file__).parent.parent / "configs"
