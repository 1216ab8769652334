"""Drift: how far a model's predictions have moved from the predictions of its base."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from midus_hf.anatomy.record import UpscaleRecord, record_of
from midus_hf.evaluation.text_rows import TextRows, evaluating
from midus_hf.look.effects import Effect, mean_with_error
from midus_hf.look.page import TextTable, table_of
from midus_hf.models.added_parts import added_parts, switched_off

# A function that takes a batch of rows that fetch nothing, and returns the base's logits, `[B, T, V]`.
LogitsOfBase = Callable[[TextRows], torch.Tensor]

# Positions whose distributions are held in float32 at a time: 131 MB for each tensor, with a vocabulary of 128,000.
_POSITIONS = 256

HOW_TO_READ = (
    "KL(base || model) is how far the distribution over the next token moved from the base's, whatever the next token is; the "
    "change of loss is that of the actual next token."
)


@dataclass(frozen=True)
class TextDrift:
    """Drift of the predictions of one text.

    Args:
        text: Name of the text.
        tokens: Number of predicted tokens.
        divergence: KL(base || model), averaged over predictions, in nats, with its standard error over rows.
        changed: Share of predictions whose likeliest token differs from the base's, with its standard error over rows.
        base_loss: Loss of the base, in nats per token.
        loss: Loss of the model, in nats per token.
        loss_effect: Difference `loss - base_loss`, with its standard error.
    """

    text: str
    tokens: int
    divergence: Effect
    changed: Effect
    base_loss: float
    loss: float
    loss_effect: Effect


def base_within(model: PreTrainedModel) -> LogitsOfBase:
    """Return the logits of the base as a function that runs the model without its added parts.

    The logits are the base's only if training has not changed the base's weights, which is not checked here.

    Raises:
        ValueError: If nothing was added to the model, or if layers of the base are missing.
    """
    parts = added_parts(model)
    if not (record_of(model.config) or UpscaleRecord()).has_whole_base:
        raise ValueError(
            "base is 'self', but the model does not have all layers of its base; expected the base itself. Give its folder."
        )

    def logits(batch: TextRows) -> torch.Tensor:
        with switched_off(model, parts):
            return model(**batch.inputs(model)).logits

    return logits


def other_base(model: PreTrainedModel, base: PreTrainedModel) -> LogitsOfBase:
    """Return the logits of the base as a function that runs a separate base model.

    Args:
        model: The model that is compared with the base.
        base: The base model, in eval mode.

    Raises:
        ValueError: If the vocabularies of the two models differ in size.
    """
    sizes = [each.config.get_text_config().vocab_size for each in (model, base)]
    if sizes[0] != sizes[1]:
        raise ValueError(
            f"the model predicts {sizes[0]:,} tokens and the base {sizes[1]:,}; expected one vocabulary. If the model's was "
            "resized, 'upscale strip' writes the base with it."
        )

    def logits(batch: TextRows) -> torch.Tensor:
        return base(**batch.inputs(base)).logits

    return logits


def drift(
    model: PreTrainedModel, logits_of_base: LogitsOfBase, texts: Sequence[TextRows], *, batch_size: int = 4
) -> list[TextDrift]:
    """Compare a model's predictions of texts with the predictions of its base.

    Both distributions are computed by log-softmax in float32 at least, and sums are float64.

    Args:
        model: The model. It is in eval mode during the comparison.
        logits_of_base: Logits of the base, from `base_within` or `other_base`.
        texts: Texts, as `text_rows` returns them.
        batch_size: Rows per forward pass. Default: 4.

    Raises:
        ValueError: If `batch_size` is less than 1.
        RuntimeError: If a divergence or loss is not finite.
    """
    with evaluating(model):
        return [_drift_on(model, logits_of_base, text, batch_size) for text in texts]


def _drift_on(model: PreTrainedModel, logits_of_base: LogitsOfBase, text: TextRows, batch_size: int) -> TextDrift:
    compared: list[torch.Tensor] = []
    batches = text.batches(batch_size)
    for batch in tqdm(batches, desc=f"drift on {text.name}", unit=" batches", leave=False, disable=None):
        logits = model(**batch.inputs(model)).logits
        compared += _compared(batch, logits, logits_of_base(replace(batch, paths=None)))
    sums_of_rows = torch.stack([columns.sum(-1) for columns in compared])  # [R, 4]
    if not sums_of_rows.isfinite().all():
        raise RuntimeError(f"a prediction of text {text.name!r} is not finite. The weights of a model are broken.")
    tokens = text.lengths
    divergence, changed, base_loss, loss = sums_of_rows.unbind(1)
    total = int(tokens.sum())
    return TextDrift(
        text.name,
        total,
        mean_with_error(divergence, tokens),
        mean_with_error(changed, tokens),
        base_loss.sum().item() / total,
        loss.sum().item() / total,
        mean_with_error(loss - base_loss, tokens),
    )


def _compared(text: TextRows, logits: torch.Tensor, base_logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield per row, `[4, predicted]`: divergence, whether the choice changed, base's loss, loss."""
    behind = text.lead - 1
    for row, model_logits, base in zip(
        text.rows, logits[:, behind:], base_logits.to(logits.device)[:, behind:], strict=True
    ):
        targets = row[text.lead :].to(model_logits.device)
        parts = [
            _compared_at(model_logits[first : first + _POSITIONS], base[first : first + _POSITIONS], part)
            for first, part in zip(range(0, len(targets), _POSITIONS), targets.split(_POSITIONS), strict=True)
        ]
        yield torch.cat(parts, dim=-1).cpu()


def _compared_at(model_logits: torch.Tensor, base: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    wide = torch.promote_types(model_logits.dtype, torch.float32)
    logs, base_logs = (logits[: len(targets)].to(wide).log_softmax(-1) for logits in (model_logits, base))
    divergence = (base_logs.exp() * (base_logs - logs)).sum(-1)
    choice, base_choice = logs.argmax(-1), base_logs.argmax(-1)
    losses = [-log.gather(-1, targets[:, None]).squeeze(-1) for log in (base_logs, logs)]
    columns = (divergence, choice != base_choice, *losses)
    return torch.stack([column.double() for column in columns])


def drift_rows(drifts: Sequence[TextDrift]) -> list[dict[str, Any]]:
    """Return a row per text."""
    rows = []
    for each in drifts:
        row = {"text": each.text, "tokens": each.tokens, "base_loss": each.base_loss, "loss": each.loss}
        for name in ("divergence", "changed", "loss_effect"):
            effect = getattr(each, name)
            row |= {name: effect.difference, f"{name}_error": effect.standard_error}
        rows.append(row)
    return rows


def drift_finding(drifts: Sequence[TextDrift]) -> str:
    """Return in one sentence how many first choices changed, and by how much the loss."""
    changes = [f"{one.changed.difference:.1%} of {one.text} (loss {one.loss_effect:+.4f})" for one in drifts]
    return f"Another next token than the base's is likeliest at {' and '.join(changes)}."


def drift_table(drifts: Sequence[TextDrift]) -> TextTable:
    """Return a table of the drift, with a row per text."""
    columns = {"text": "{text}", "tokens": "{tokens:,}", "KL(base || model)": "{divergence:.5f}"}
    columns |= {"first choice changed": "{changed:.2%}", "loss of base": "{base_loss:.5f}", "of model": "{loss:.5f}"}
    columns["change"] = "{loss_effect:+.5f}"
    return table_of("How far predictions moved from the base's (nats per token)", map(vars, drifts), columns)
