"""What was found of how far predictions moved: tables, JSON, and pages with the passages that moved farthest."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from midus_hf.analysis.inside.drift import MovedRow, TextDrift
from midus_hf.analysis.inside.layer_effects import LayerEffects
from midus_hf.analysis.inside.layer_report import draw_layers, layers_table
from midus_hf.analysis.page import ColouredToken, write_page
from midus_hf.analysis.slots.block_usage import BlockUsage
from midus_hf.analysis.slots.report import blocks_table, draw_blocks
from midus_hf.analysis.table_of_words import TableOfWords, with_error

_MOST_TOKENS, _CONTEXT = 3, 8
"""Which are told of a row on a terminal, and how many tokens stand in front of each."""

_HOW_TO_READ = (
    "KL(base || model) tells how far the distribution over the next token moved from the base's, whatever the next token is; the "
    "change of loss tells of the token that came. A token is the redder the farther its prediction moved: 1 - exp(-KL) of the full "
    "colour. Point at it to see what base and model find likeliest there."
)
_OF_PARTS = (
    "A part is worth to a text what its loss grows by without it. Parts can stand in for one another, so effects of single ones "
    "need not add up to that of all."
)
_OF_VALUES = (
    "What a slot adds is read through the model's final norm and head, as if it were all there is: a probe, no proof."
)


def drift_table(found: Sequence[TextDrift]) -> TableOfWords:
    """A row per text."""
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
        for of_text in found
    ]
    return TableOfWords("How far predictions moved from the base's (nats per token)", head, rows)


def moved_table(found: Sequence[TextDrift], tokenizer: PreTrainedTokenizerBase) -> TableOfWords:
    """The rows that moved farthest, and the tokens in them whose predictions did; none where nothing moved."""
    rows = []
    for of_text in found:
        for row in of_text.worst:
            if row.divergence.any():
                place = f"{of_text.text} {row.document}"
                rows += [
                    [place if first else "", f"{row.mean:.4f}" if first else "", *words]
                    for first, words in _moved_most(row, tokenizer)
                ]
    head = ["document", "KL", "behind", "base", "model", "KL there"]
    return TableOfWords("What moved farthest", head, rows)


def _moved_most(row: MovedRow, tokenizer: PreTrainedTokenizerBase) -> list[tuple[bool, list[str]]]:
    """For each of the predictions that moved most, whether it is the first, and what stands in front, choices, divergence."""
    best = row.divergence.topk(min(_MOST_TOKENS, len(row.divergence)))
    lines = []
    for number, (place, value) in enumerate(zip(best.indices.tolist(), best.values.tolist(), strict=True)):
        front = " ".join(_decoded(tokenizer, row.ids[max(0, place + 1 - _CONTEXT) : place + 1].tolist()).split())
        choices = [repr(_decoded(tokenizer, [int(choice[place])])) for choice in (row.base_choice, row.choice)]
        lines.append((number == 0, [f"... {front}", *choices, f"{value:.3f}"]))
    return lines


def as_json(found: Sequence[TextDrift], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """All numbers of texts, and of the rows that moved farthest."""
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
                            "token": _decoded(tokenizer, [int(row.ids[place + 1])]),
                            "divergence": float(row.divergence[place]),
                            "loss_change": float(row.loss_change[place]),
                            "base_choice": _decoded(tokenizer, [int(row.base_choice[place])]),
                            "choice": _decoded(tokenizer, [int(row.choice[place])]),
                        }
                        for place in range(len(row.divergence))
                    ],
                }
                for row in of_text.worst
            ],
        }
        for of_text in found
    }


def write_drift_page(
    path: Path, report: Mapping[str, Any], found: Sequence[TextDrift], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write a page that needs no other file.

    Args:
        path: The file.
        report: What was compared: `model` and `base`.
        found: From `drift`.
        tokenizer: Of the model.
    """
    what = f"{report['model']} compared with {report['base']}."
    write_page(
        path, "How far predictions moved", [what, _HOW_TO_READ], [drift_table(found)], {}, _passages(found, tokenizer)
    )


def write_inside_page(
    path: Path,
    compared: Mapping[str, str],
    effects: LayerEffects,
    moved: Sequence[TextDrift],
    values: Sequence[TableOfWords],
    fetched: Mapping[str, BlockUsage],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    """Write a page that needs no other file. Needs matplotlib.

    Args:
        path: The file.
        compared: `model` and `base`.
        effects: From `layer_effects`.
        moved: From `drift`.
        values: From `slots_table`, of each memory that has slots.
        fetched: By text, from `usage_by_rows`; empty where nothing is fetched.
        tokenizer: Of the model.
    """
    what = f"{compared['model']} compared with {compared['base']}."
    paragraphs = [what, _OF_PARTS, _HOW_TO_READ, *([_OF_VALUES] if values else [])]
    tables = [drift_table(moved), layers_table(effects), moved_table(moved, tokenizer), *values, blocks_table(fetched)]
    told = [table for table in tables if table.rows]
    pictures = {"Loss without each part": draw_layers(effects)}
    if fetched:
        pictures["How often blocks are fetched"] = draw_blocks(fetched)
    write_page(path, "Inside what was added", paragraphs, told, pictures, _passages(moved, tokenizer))


def _passages(found: Sequence[TextDrift], tokenizer: PreTrainedTokenizerBase) -> dict[str, Sequence[ColouredToken]]:
    """The rows that moved farthest, coloured by how far each prediction in them moved, by what they are."""
    return {
        f"{of_text.text}, document {row.document}: KL {row.mean:.4f} ({number} of {len(of_text.worst)})": _passage(
            row, tokenizer
        )
        for of_text in found
        for number, row in enumerate(of_text.worst, start=1)
    }


def _passage(row: MovedRow, tokenizer: PreTrainedTokenizerBase) -> list[ColouredToken]:
    tokens = [ColouredToken(_decoded(tokenizer, [int(row.ids[0])]))]
    for place, value in enumerate(row.divergence.tolist()):
        of_base, of_model = (
            repr(_decoded(tokenizer, [int(choice[place])])) for choice in (row.base_choice, row.choice)
        )
        hint = f"KL {value:.3f}, loss {float(row.loss_change[place]):+.3f}; base {of_base}, model {of_model}"
        strength = 1 - math.exp(-max(value, 0.0))
        tokens.append(ColouredToken(_decoded(tokenizer, [int(row.ids[place + 1])]), strength, hint))
    return tokens


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
