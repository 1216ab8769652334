"""What models are called in tables and pictures."""

from collections.abc import Sequence
from pathlib import Path


def short_names(models: Sequence[str]) -> list[str]:
    """The last part of each folder or hub id where that tells them apart, else the whole of each."""
    short = [Path(model).name or model for model in models]
    return short if len(set(short)) == len(short) else list(models)
