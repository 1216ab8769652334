"""Results about the parts that were added to a model: a table, JSON, CSV, and a picture."""

from typing import Any

from midus_hf.analysis.inside.layer_effects import LayerEffects, PartEffect
from midus_hf.analysis.pictures import new_figure
from midus_hf.analysis.table_of_words import TableOfWords, csv_text

HOW_TO_READ = (
    "The effect of a part on a text is how much the text's loss grows without the part. Parts can stand in for one another, so the "
    "effects of single parts need not add up to the effect of all parts."
)
_COLUMNS = ["part", "kind", "memory", "layers", "text", "loss", "difference", "standard_error"]
_WIDTH, _HEIGHT_OF_ROW = 4.5, 0.24


def layers_table(layer_effects: LayerEffects) -> TableOfWords:
    """Return a table with a row per part: the loss without the part minus the loss of the unchanged model."""
    texts = list(layer_effects.losses)
    rows = [["none", *(f"{layer_effects.losses[text]:.5f}" for text in texts)]]
    rows += [[row.name, *(row.effects[text].words for text in texts)] for row in layer_effects.rows]
    last = "loss of the base's layers" if layer_effects.whole_base else "loss of what is left"
    rows.append([last, *(f"{layer_effects.without_all.losses[text]:.5f}" for text in texts)])
    title = "Loss without a part, less loss as it is (nats per token)"
    return TableOfWords(title, ["without", *texts], rows)


def as_json(layer_effects: LayerEffects) -> dict[str, Any]:
    """Return all numbers, for other programs."""
    return {
        "texts": {
            name: {"tokens": layer_effects.tokens[name], "loss": loss} for name, loss in layer_effects.losses.items()
        },
        "parts": [_row_of_json(row) for row in layer_effects.parts],
        "without_all": _row_of_json(layer_effects.without_all),
        "base": [_row_of_json(row) for row in layer_effects.base],
        "without_all_is_the_base": layer_effects.whole_base,
    }


def _row_of_json(row: PartEffect) -> dict[str, Any]:
    texts = {name: {"loss": row.losses[name], **vars(effect)} for name, effect in row.effects.items()}
    return {**_of_part(row), "texts": texts}


def _of_part(row: PartEffect) -> dict[str, Any]:
    if row.part is None:
        return {"part": row.name, "kind": "all", "memory": "", "layers": []}
    kind = row.part.kind if row.part.bank is None else "bank"
    return {"part": row.name, "kind": kind, "memory": row.part.memory, "layers": list(row.part.layers)}


def as_csv(layer_effects: LayerEffects) -> str:
    """Return a CSV file with a line per part and text."""
    lines: list[list[Any]] = []
    for row in layer_effects.rows:
        part, kind, memory, layers = _of_part(row).values()
        cells = [part, kind, memory, " ".join(map(str, layers))]
        for text, effect in row.effects.items():
            lines.append([*cells, text, row.losses[text], effect.difference, effect.standard_error])
    return csv_text(_COLUMNS, lines)


def draw_layers(layer_effects: LayerEffects) -> Any:
    """Return a figure of how much the loss grows without each part: a panel per text, a bar per part. Needs matplotlib."""
    colours = {"all": "#888888", "base": "#9bb7d4"}
    rows = layer_effects.rows
    figure = new_figure(2 + _WIDTH * len(layer_effects.losses), 1.2 + _HEIGHT_OF_ROW * len(rows))
    panels = figure.subplots(1, len(layer_effects.losses), sharey=True, squeeze=False)[0]
    for axes, (text, loss) in zip(panels, layer_effects.losses.items(), strict=True):
        effects = [row.effects[text] for row in rows]
        axes.barh(
            range(len(rows)),
            [effect.difference for effect in effects],
            xerr=[effect.standard_error or 0.0 for effect in effects],
            color=[colours.get(_of_part(row)["kind"], "#c44e52") for row in rows],
            ecolor="#333333",
        )
        if layer_effects.base:  # a layer of the base may cost a hundred times as much as one that was added
            of_added = [abs(row.effects[text].difference) for row in (*layer_effects.parts, layer_effects.without_all)]
            axes.set_xscale("symlog", linthresh=max(*of_added, 1e-3))
        axes.axvline(0, color="#333333", linewidth=0.8)
        axes.set_title(f"{text}: loss {loss:.4f} as it is", fontsize=9)
        axes.set_xlabel("loss without it, less loss as it is (nats per token)", fontsize=8)
        axes.tick_params(axis="x", labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    panels[0].invert_yaxis()
    return figure
