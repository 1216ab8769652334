"""Results about drift: tables, JSON, and the passages whose predictions moved farthest."""

import math
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from midus_hf.analysis.inside.drift import MovedRow, TextDrift
from midus_hf.analysis.page import ColouredToken
from midus_hf.analysis.table_of_words import TableOfWords, with_error

# Number of tokens per row that a terminal shows, and number of tokens shown in front of each.
_MOST_TOKENS, _CONTEXT = 3, 8

HOW_TO_READ = (
    "KL(base || model) tells how far the distribution over the next token moved from the base's, whatever the next token is; the "
    "change of loss is that of the token that came. A token is the redder the farther its prediction moved: 1 - exp(-KL) of the full "
    "colour. Point at it to see what base and model find likeliest there."
)


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
            "tokens": of_text.tokens,
            "divergence": of_text.divergence,
            "divergence_error": of_text.divergence_error,
            "changed": of_text.changed,
            "changed_error": of_text.changed_error,
            "base_loss": of_text.base_loss,
            "loss": of_text.loss,
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
