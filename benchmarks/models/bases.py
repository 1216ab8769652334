"""The bases that go by a name."""

from pathlib import Path

CONFIGS = Path(__file__).parent / "configs"
"""Folder of a config.json of each, named as it is."""
