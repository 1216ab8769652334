"""Perplexity as `midus eval` measures it of a loaded model."""

import dataclasses
from types import SimpleNamespace
from typing import Any

from midus_hf.evaluation.text_rows import read_rows, text_rows


def perplexity(
    model, tokenizer, documents, *, apart=False, find_paths=None, batch_size=4, **lengths: Any
) -> SimpleNamespace:
    """Return `perplexity`, the number of predicted `tokens`, and their greatest number in a window, `sequence_length`."""
    rows = text_rows("text", documents, tokenizer, model.config, joined=not apart, **lengths)
    if find_paths is not None:
        rows = dataclasses.replace(rows, paths=find_paths(documents))
    losses = read_rows(model, rows, batch_size=batch_size)
    longest = max(len(row) - 1 for row in rows.rows)
    return SimpleNamespace(perplexity=losses.perplexity, tokens=rows.num_tokens, sequence_length=longest)
