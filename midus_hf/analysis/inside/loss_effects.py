"""What a change of a model does to its loss on a text."""

import math
from dataclasses import dataclass

import torch

from midus_hf.analysis.table_of_words import with_error
from midus_hf.analysis.text_rows import RowLosses


@dataclass(frozen=True)
class Effect:
    """What an intervention does to the loss on a text.

    Args:
        difference: Loss with it minus loss without, in nats per predicted token.
        standard_error: Of the difference, from how it varies over rows. None for one row.
    """

    difference: float
    standard_error: float | None

    @property
    def words(self) -> str:
        """The difference with its error, as a table tells it."""
        return with_error(f"{self.difference:+.5f}", self.standard_error)


def effect_between(usual: RowLosses, changed: RowLosses) -> Effect:
    """The difference of losses per token.

    Args:
        usual: Of the model as it is.
        changed: On the same rows.
    """
    return Effect(*ratio_with_error(changed.sums - usual.sums, usual.tokens))


def ratio_with_error(sums: torch.Tensor, tokens: torch.Tensor) -> tuple[float, float | None]:
    """A mean per token, and its standard error: that of a ratio over rows that were drawn at random. None for one row.

    Args:
        sums: `[R]`, float64, of each row.
        tokens: `[R]`, of each row.
    """
    counts = tokens.double()
    mean = (sums.sum() / counts.sum()).item()
    rows = len(counts)
    if rows < 2:
        return mean, None
    scatter = (sums - mean * counts).square().sum().item()
    return mean, math.sqrt(scatter * rows / (rows - 1)) / counts.sum().item()
