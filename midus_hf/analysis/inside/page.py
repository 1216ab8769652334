"""What was found of a model and of what was added to it, as one page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from midus_hf.analysis.inside.drift import TextDrift
from midus_hf.analysis.inside.drift_report import HOW_TO_READ, drift_table, moved_table, passages_of
from midus_hf.analysis.inside.layer_effects import LayerEffects
from midus_hf.analysis.inside.layer_report import draw_layers, layers_table
from midus_hf.analysis.page import write_page
from midus_hf.analysis.slots.block_report import blocks_table, draw_blocks
from midus_hf.analysis.slots.block_usage import BlockUsage
from midus_hf.analysis.table_of_words import TableOfWords

_OF_PARTS = (
    "A part is worth to a text what its loss grows by without it. Parts can stand in for one another, so effects of single ones "
    "need not add up to that of all."
)
_OF_VALUES = (
    "What a slot adds is read through the model's final norm and head, as if it were all there is: a probe, no proof."
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
    paragraphs = [what, _OF_PARTS, HOW_TO_READ, *([_OF_VALUES] if values else [])]
    tables = [drift_table(moved), layers_table(effects), moved_table(moved, tokenizer), *values, blocks_table(fetched)]
    pictures = {"Loss without each part": draw_layers(effects)}
    if fetched:
        pictures["How often blocks are fetched"] = draw_blocks(fetched)
    write_page(
        path,
        "Inside what was added",
        paragraphs,
        [table for table in tables if table.rows],
        pictures,
        passages_of(moved, tokenizer),
    )
