"""Effects of a change of a model on its losses, with standard errors over rows."""

import math
from dataclasses import dataclass

from midus_hf.evaluation.text_rows import RowLosses


@dataclass(frozen=True)
class Effect:
    """Effect of an intervention on the loss of a text.

    Args:
        difference: Loss with the intervention minus loss without it, in nats per predicted token.
        standard_error: Standard error of the difference, from its variation over rows. None for one row.
    """

    difference: float
    standard_error: float | None

    def __format__(self, form: str) -> str:
        error = "" if self.standard_error is None else f" ± {self.standard_error:{form.removeprefix('+')}}"
        return f"{self.difference:{form}}{error}"


def effect_between(usual: RowLosses, changed: RowLosses) -> Effect:
    """Return the loss per token of the changed model minus that of the unchanged model on the same rows, with its error.

    The error is that of a ratio of sums over random rows.
    """
    sums, counts = changed.sums - usual.sums, usual.tokens.double()
    mean, rows = (sums.sum() / counts.sum()).item(), len(counts)
    if rows < 2:
        return Effect(mean, None)
    scatter = (sums - mean * counts).square().sum().item()
    return Effect(mean, math.sqrt(scatter * rows / (rows - 1)) / counts.sum().item())
