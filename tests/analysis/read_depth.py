"""Texts that a model reads while what it reads of the depth is recorded."""

from typing import Any

import torch

from midus_hf.analysis.depth.reading import DepthReading, depth_readings
from midus_hf.analysis.depth.records import record_depth
from midus_hf.analysis.text_rows import TextRows, read_rows


def rows(*lengths: int) -> TextRows:
    """A text of random tokens, a document per row."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, 128, (length,), generator=generator) for length in lengths]
    return TextRows("text", ids, list(range(len(ids))))


def read(model: Any, text: TextRows, batch_size: int = 4, **options: Any) -> list[DepthReading]:
    """What a model reads of the depth while it reads a text."""
    with record_depth(model, **options) as records:
        read_rows(model, text, batch_size=batch_size)
    return depth_readings(records)
