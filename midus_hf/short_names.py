"""Short names of models for tables and pictures."""

from collections.abc import Sequence
from pathlib import Path


def short_names(models: Sequence[str]) -> list[str]:
    """Return the last part of each folder or hub id if these parts are all different, else the full folders and ids."""
    short = [Path(model).name or model for model in models]
    return short if len(set(short)) == len(short) else list(models)
