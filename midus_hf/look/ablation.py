"""Effects on the loss of texts when a model computes without one added part, or without all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from midus_hf.evaluation.text_rows import RowLosses, TextRows, row_losses
from midus_hf.look.page import Panel, TextTable, bars
from midus_hf.models.view import ModelView, Part, switched_off
from midus_hf.sources.progress import show_progress

HOW_TO_READ = (
    "The effect of a part on a text is how much the text's loss grows without the part. Parts can compensate for one another, so the "
    "effects of single parts need not add up to the effect of all parts."
)
_ALL = "all of them"  # name of all added parts together among the parts


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
    """Return the changed loss per token minus the usual one; the error is that of a ratio of row sums."""
    sums = changed.sums - usual.sums
    counts = usual.tokens.double()
    mean = (sums.sum() / counts.sum()).item()
    rows = len(counts)
    if rows < 2:
        return Effect(mean, None)
    scatter = (sums - mean * counts).square().sum().item()
    return Effect(mean, math.sqrt(scatter * rows / (rows - 1)) / counts.sum().item())


@dataclass(frozen=True)
class PartEffect:
    """Loss of a model on a text without one of its parts.

    Args:
        part: Name of the part that was switched off; `all of them` for all added parts together.
        kind: Kind of the part, as in `Part`; `all` for all added parts together.
        layers: Indices of the part's decoder layers.
        text: Name of the text.
        loss: Loss without the part, in nats per predicted token.
        effect: The loss without the part minus the loss of the unchanged model.
    """

    part: str
    kind: str
    layers: list[int]
    text: str
    loss: float
    effect: Effect

    def row(self) -> dict[str, object]:
        """Return the fields as a row of numbers."""
        return {**{key: value for key, value in vars(self).items() if key != "effect"}, **vars(self.effect)}


@dataclass(frozen=True)
class Ablation:
    """Losses of a model without each of its parts.

    Args:
        losses: Loss of each text with the unchanged model, in nats per predicted token.
        effects: Effects of single parts, then of all added parts together, each on every text.
        whole_base: Whether the model without all added parts is the base, if the base's weights are unchanged.
    """

    losses: dict[str, float]
    effects: list[PartEffect]
    whole_base: bool


def ablate(model: PreTrainedModel, texts: Sequence[TextRows], *, batch_size: int = 4) -> Ablation:
    """Measure how much the loss of texts changes without each added part.

    Args:
        model: A model as in `added_parts`. It is in eval mode during the measurement.
        texts: Texts, as `text_rows` returns them.
        batch_size: Rows per forward pass. Default: 4.

    Raises:
        RequestError: For the reasons of `added_parts` and `row_losses`.
    """
    view = ModelView(model)
    parts = view.parts

    def losses_of_texts() -> dict[str, RowLosses]:
        return {text.name: row_losses(model, text, batch_size=batch_size) for text in texts}

    usual = losses_of_texts()
    effects = []
    without = [*((part, [part]) for part in parts), (Part(_ALL, "all", ()), parts)]
    for part, off in show_progress(without, desc="ablation", unit=" parts"):
        with switched_off(model, off):
            changed = losses_of_texts()
        for text, losses in changed.items():
            effect = effect_between(usual[text], losses)
            effects.append(PartEffect(part.name, part.kind, list(part.layers), text, losses.mean, effect))
    has_whole_base = view.record.has_whole_base
    return Ablation({text: losses.mean for text, losses in usual.items()}, effects, has_whole_base)


def ablation_table(ablation: Ablation) -> TextTable:
    """Return a table with a row per part: the loss without the part minus the loss of the unchanged model."""
    texts = list(ablation.losses)
    columns: dict[str, list[str]] = {"none": [f"{loss:.5f}" for loss in ablation.losses.values()]}
    for row in ablation.effects:
        columns.setdefault(row.part, []).append(f"{row.effect:+.5f}")
    last = "loss of the base's layers" if ablation.whole_base else "loss of the remaining model"
    columns[last] = [f"{row.loss:.5f}" for row in ablation.effects if row.kind == "all"]
    rows = [[name, *cells] for name, cells in columns.items()]
    return TextTable("Loss without a part, less loss as it is (nats per token)", ["without", *texts], rows)


def ablation_finding(ablation: Ablation) -> str:
    """Return in a sentence the effect of all added parts, and the part with the largest effect."""
    together = [f"{row.effect:+.4f} on {row.text}" for row in ablation.effects if row.part == _ALL]
    single = [row for row in ablation.effects if row.part != _ALL]
    most = max(single, key=lambda row: abs(row.effect.difference))
    return (
        f"Without all that was added, the loss changes by {' and '.join(together)}; of single parts, {most.part} changes it most, "
        f"by {most.effect:+.4f} on {most.text}."
    )


def ablation_panels(ablation: Ablation) -> dict[str, Panel]:
    """Return a panel per text with a bar per part: how much the loss grows without it."""
    panels = {}
    for text, loss in ablation.losses.items():
        rows = [row for row in ablation.effects if row.text == text]
        lengths = {row.part: (row.effect.difference, row.effect.standard_error or 0.0) for row in rows}
        x = "loss without the part, less loss as it is (nats per token)"
        panels[f"{text}: loss {loss:.4f} as it is"] = bars(lengths, x, _ALL)
    return panels
