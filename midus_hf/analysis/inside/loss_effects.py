"""Effect of a change of a model on its loss on a text."""

import math
from dataclasses import dataclass

import torch

from midus_hf.analysis.table_of_words import with_error
from midus_hf.analysis.text_rows import RowLosses


@dataclass(frozen=True)
class Effect:
    """Effect of an intervention on the loss of a text.

    Args:
        difference: Loss with the intervention minus loss without it, in nats per predicted token.
        standard_error: Standard error of the difference, from its variation over rows. None for one row.
    """

    difference: float
    standard_error: float | None

    @property
    def words(self) -> str:
        """Difference and standard error as text for a table."""
        return with_error(f"{self.difference:+.5f}", self.standard_error)


def effect_between(usual: RowLosses, changed: RowLosses) -> Effect:
    """Return the difference of two losses per token, changed minus usual, with its standard error.

    Args:
        usual: Losses of the unchanged model.
        changed: Losses of the changed model on the same rows.
    """
    return Effect(*ratio_with_error(changed.sums - usual.sums, usual.tokens))


def ratio_with_error(sums: torch.Tensor, tokens: torch.Tensor) -> tuple[float, float | None]:
    """Return a mean per token and its standard error, or None instead of the error for one row.

    The error is the standard error of a ratio of sums over rows that were drawn at random.

    Args:
        sums: Sum over the tokens of each row, `[R]`, float64.
        tokens: Number of tokens of each row, `[R]`.
    """
    counts = tokens.double()
    mean = (sums.sum() / counts.sum()).item()
    rows = len(counts)
    if rows < 2:
        return mean, None
    scatter = (sums - mean * counts).square().sum().item()
    return mean, math.sqrt(scatter * rows / (rows - 1)) / counts.sum().item()
