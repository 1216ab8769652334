"""Drift: how far a model's predictions have moved from the predictions of its base, with tables, JSON, and coloured passages."""

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from midus_hf.look.page import ColouredToken, TableOfWords, with_error
from midus_hf.look.parts import added_parts, switched_off
from midus_hf.look.text_rows import Effect, TextRows, inputs_of, ratio_with_error
from midus_hf.look.watched_models import evaluating

# A function that takes rows of token ids `[T]` and returns the base's logits, `[B, T, V]`.
LogitsOfBase = Callable[[Sequence[torch.Tensor]], torch.Tensor]

# Positions whose distributions are held in float32 at a time: 131 MB for each tensor, with a vocabulary of 128,000.
_POSITIONS = 256
# Least number of predictions that the ranking divides by: the mean of a few predictions is large by chance.
_FEWEST = 16
# Number of tokens per row that a terminal shows, and number of tokens shown in front of each.
_MOST_TOKENS, _CONTEXT = 3, 8

HOW_TO_READ = (
    "KL(base || model) tells how far the distribution over the next token moved from the base's, whatever the next token is; the "
    "change of loss is that of the token that came. A token is the redder the farther its prediction moved: 1 - exp(-KL) of the full "
    "colour. Point at it to see what base and model find likeliest there."
)


@dataclass(frozen=True)
class MovedRow:
    """A row of a text, with how far each prediction in the row moved.

    Args:
        document: Number of the document that the row belongs to.
        ids: Token ids of the row, `[T]`.
        divergence: KL(base || model) of each prediction, of tokens 1 to T - 1, `[T - 1]`, float64, in nats.
        base_choice: Id of the token that the base finds likeliest, `[T - 1]`, int64.
        choice: Id of the token that the model finds likeliest, `[T - 1]`, int64.
        loss_change: Loss of the model minus loss of the base per token, `[T - 1]`, float64, in nats.
    """

    document: int
    ids: torch.Tensor
    divergence: torch.Tensor
    base_choice: torch.Tensor
    choice: torch.Tensor
    loss_change: torch.Tensor

    @property
    def mean(self) -> float:
        """Mean divergence per prediction."""
        return self.divergence.double().mean().item()

    @property
    def rank(self) -> float:
        """Mean divergence by which rows are ranked. A short row counts as 16 predictions, the missing ones as unmoved."""
        return (self.divergence.double().sum() / max(len(self.divergence), _FEWEST)).item()


@dataclass(frozen=True)
class TextDrift:
    """Drift of the predictions of one text.

    Args:
        text: Name of the text.
        tokens: Number of predicted tokens.
        divergence: KL(base || model), averaged over predictions, in nats.
        divergence_error: Standard error of `divergence`, from its variation over rows. None for one row.
        changed: Share of predictions whose likeliest token differs from the base's.
        changed_error: Standard error of `changed`, from its variation over rows. None for one row.
        base_loss: Loss of the base, in nats per token.
        loss: Loss of the model, in nats per token.
        loss_effect: Difference `loss - base_loss`, with its standard error.
        worst: Rows that moved farthest, in descending order of `MovedRow.rank`.
    """

    text: str
    tokens: int
    divergence: float
    divergence_error: float | None
    changed: float
    changed_error: float | None
    base_loss: float
    loss: float
    loss_effect: Effect
    worst: list[MovedRow] = field(repr=False)


def base_within(model: PreTrainedModel) -> LogitsOfBase:
    """Return the logits of the base as a function that runs the model without its added parts.

    The logits are the base's only if training has not changed the base's weights, which is not checked here.

    Raises:
        ValueError: If nothing was added to the model, or if layers of the base are missing.
    """
    added = added_parts(model)
    if not added.whole_base:
        raise ValueError(
            "base is 'self', but the model does not have all layers of its base; expected the base itself. Give its folder."
        )

    def logits(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        with switched_off(model, added.parts):
            return model(**inputs_of(model, rows)).logits

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
        raise ValueError(f"the model predicts {sizes[0]:,} tokens and the base {sizes[1]:,}; expected one vocabulary.")

    def logits(rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return base(**inputs_of(base, rows)).logits

    return logits


def drift(
    model: PreTrainedModel,
    logits_of_base: LogitsOfBase,
    texts: Sequence[TextRows],
    *,
    most_shown: int = 5,
    batch_size: int = 4,
    progress: Callable[[int], None] | None = None,
) -> list[TextDrift]:
    """Compare a model's predictions of texts with the predictions of its base.

    Both distributions are computed by log-softmax in float32 at least, and sums are float64. Only a few sums per row and the
    rows that moved farthest are kept, so a text may be of any length.

    Args:
        model: The model. It is in eval mode during the comparison.
        logits_of_base: Logits of the base, from `base_within` or `other_base`.
        texts: Texts, as `text_rows` returns them.
        most_shown: Number of rows per text that are kept whole. Default: 5.
        batch_size: Rows per forward pass. Default: 4.
        progress: Called with the number of tokens of each pass. Default: none.

    Raises:
        ValueError: If `batch_size` or `most_shown` is less than 1.
        RuntimeError: If a divergence or loss is not finite.
    """
    if most_shown < 1:
        raise ValueError(f"most_shown is {most_shown}; expected at least 1.")
    with evaluating(model):
        return [_of_text(model, logits_of_base, text, most_shown, batch_size, progress) for text in texts]


def _of_text(
    model: PreTrainedModel,
    logits_of_base: LogitsOfBase,
    text: TextRows,
    most_shown: int,
    batch_size: int,
    progress: Callable[[int], None] | None,
) -> TextDrift:
    sums: list[torch.Tensor] = []
    worst: list[tuple[float, int, MovedRow]] = []
    for batch in text.batches(batch_size):
        logits = model(**inputs_of(model, batch.rows, batch.row_paths)).logits
        compared = list(_compared(batch.rows, logits, logits_of_base(batch.rows)))
        for row, document, parts in zip(batch.rows, batch.documents, compared, strict=True):
            divergence, _, base_loss, loss, base_choice, choice = parts
            moved = MovedRow(document, row, divergence, base_choice.long(), choice.long(), loss - base_loss)
            heapq.heappush(worst, (moved.rank, -len(sums), moved))
            if len(worst) > most_shown:
                heapq.heappop(worst)
            sums.append(parts.double().sum(-1))
        if progress is not None:
            progress(batch.num_tokens)
    of_rows = torch.stack(sums)  # [R, 6]
    if not of_rows.isfinite().all():
        raise RuntimeError(f"a prediction of text {text.name!r} is not finite. The weights of a model are broken.")
    tokens = torch.tensor([len(row) - 1 for row in text.rows])
    (divergence_mean, divergence_error), (changed, changed_error) = (
        ratio_with_error(of_rows[:, column], tokens) for column in (0, 1)
    )
    base_loss_sum, loss_sum = of_rows[:, 2], of_rows[:, 3]
    total = int(tokens.sum())
    return TextDrift(
        text.name,
        total,
        divergence_mean,
        divergence_error,
        changed,
        changed_error,
        base_loss_sum.sum().item() / total,
        loss_sum.sum().item() / total,
        Effect(*ratio_with_error(loss_sum - base_loss_sum, tokens)),
        [row for _, _, row in sorted(worst, key=lambda one: one[:2], reverse=True)],
    )


def _compared(rows: Sequence[torch.Tensor], logits: torch.Tensor, of_base: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield per row, `[6, T - 1]`: divergence, whether the choice changed, base's loss, loss, base's choice, choice."""
    for row, own, base in zip(rows, logits, of_base.to(logits.device), strict=True):
        targets = row[1:].to(own.device)
        parts = [
            _of_positions(own[first : first + _POSITIONS], base[first : first + _POSITIONS], of_part)
            for first, of_part in zip(range(0, len(targets), _POSITIONS), targets.split(_POSITIONS), strict=True)
        ]
        yield torch.cat(parts, dim=-1).cpu()


def _of_positions(own: torch.Tensor, base: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    logs: list[Any] = [_log_softmax(logits[: len(targets)]) for logits in (own, base)]
    of_model, of_base = logs
    divergence = (of_base.exp() * (of_base - of_model)).sum(-1)
    choice, base_choice = of_model.argmax(-1), of_base.argmax(-1)
    losses = [-log.gather(-1, targets[:, None]).squeeze(-1) for log in (of_base, of_model)]
    columns = (divergence, choice != base_choice, *losses, base_choice, choice)
    return torch.stack([column.double() for column in columns])


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)


def drift_table(drifts: Sequence[TextDrift]) -> TableOfWords:
    """Return a table of the drift, with a row per text."""
    head = ["text", "tokens", "KL(base || model)", "first choice changed", "loss of base", "of model", "change"]
    rows = [
        [
            of_text.text,
            f"{of_text.tokens:,}",
            with_error(f"{of_text.divergence:.5f}", of_text.divergence_error),
            with_error(f"{of_text.changed:.2%}", of_text.changed_error, "{:.2%}"),
            f"{of_text.base_loss:.5f}",
            f"{of_text.loss:.5f}",
            of_text.loss_effect.words,
        ]
        for of_text in drifts
    ]
    return TableOfWords("How far predictions moved from the base's (nats per token)", head, rows)


def moved_table(drifts: Sequence[TextDrift], tokenizer: PreTrainedTokenizerBase) -> TableOfWords:
    """Return a table of the rows that moved farthest, and of the tokens in them that moved most; empty if nothing moved."""
    rows = []
    for of_text in drifts:
        for row in of_text.worst:
            if row.divergence.any():
                label = f"{of_text.text} {row.document}"
                rows += [
                    [label if first else "", f"{row.mean:.4f}" if first else "", *cells]
                    for first, cells in _moved_most(row, tokenizer)
                ]
    head = ["document", "KL", "behind", "base", "model", "KL there"]
    return TableOfWords("What moved farthest", head, rows)


def _moved_most(row: MovedRow, tokenizer: PreTrainedTokenizerBase) -> list[tuple[bool, list[str]]]:
    """Return, per prediction that moved most, whether it is the first, and cells: context, both choices, divergence."""
    best = row.divergence.topk(min(_MOST_TOKENS, len(row.divergence)))
    lines = []
    for number, (position, value) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True)):
        front = " ".join(_decoded(tokenizer, row.ids[max(0, position + 1 - _CONTEXT) : position + 1].tolist()).split())
        choices = [repr(_decoded(tokenizer, [int(choice[position])])) for choice in (row.base_choice, row.choice)]
        lines.append((number == 0, [f"... {front}", *choices, f"{value:.3f}"]))
    return lines


def as_json(drifts: Sequence[TextDrift], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return all numbers of texts and of the rows that moved farthest, for other programs."""
    return {
        of_text.text: {
            **{key: value for key, value in vars(of_text).items() if key not in ("text", "loss_effect", "worst")},
            "loss_change": of_text.loss_effect.difference,
            "loss_change_error": of_text.loss_effect.standard_error,
            "worst": [
                {
                    "document": row.document,
                    "divergence": row.mean,
                    "tokens": [
                        {
                            "token": _decoded(tokenizer, [int(row.ids[position + 1])]),
                            "divergence": float(row.divergence[position]),
                            "loss_change": float(row.loss_change[position]),
                            "base_choice": _decoded(tokenizer, [int(row.base_choice[position])]),
                            "choice": _decoded(tokenizer, [int(row.choice[position])]),
                        }
                        for position in range(len(row.divergence))
                    ],
                }
                for row in of_text.worst
            ],
        }
        for of_text in drifts
    }


def passages(drifts: Sequence[TextDrift], tokenizer: PreTrainedTokenizerBase) -> dict[str, Sequence[ColouredToken]]:
    """Return the rows that moved farthest, by title; tokens are coloured by how far their prediction moved."""
    return {
        f"{of_text.text}, document {row.document}: KL {row.mean:.4f} ({number} of {len(of_text.worst)})": _passage(
            row, tokenizer
        )
        for of_text in drifts
        for number, row in enumerate(of_text.worst, start=1)
    }


def _passage(row: MovedRow, tokenizer: PreTrainedTokenizerBase) -> list[ColouredToken]:
    tokens = [ColouredToken(_decoded(tokenizer, [int(row.ids[0])]))]
    for position, value in enumerate(row.divergence.tolist()):
        of_base, of_model = (
            repr(_decoded(tokenizer, [int(choice[position])])) for choice in (row.base_choice, row.choice)
        )
        hint = f"KL {value:.3f}, loss {float(row.loss_change[position]):+.3f}; base {of_base}, model {of_model}"
        strength = 1 - math.exp(-max(value, 0.0))
        tokens.append(ColouredToken(_decoded(tokenizer, [int(row.ids[position + 1])]), strength, hint))
    return tokens


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
