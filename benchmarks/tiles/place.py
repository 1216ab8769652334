"""Where the table lies that kernels read."""

from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent.parent / "midus_hf" / "ops" / "measured_tiles.py"
