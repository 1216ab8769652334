"""Effects on the loss of texts when a model computes without an added part, one part at a time, and without all of them.

The results are also a table, JSON, CSV, and a picture.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from midus_hf.look.page import TableOfWords, csv_text
from midus_hf.look.parts import Part, added_parts, switched_off
from midus_hf.look.pictures import new_figure
from midus_hf.look.text_rows import Effect, RowLosses, TextRows, adding, effect_between, read_rows
from midus_hf.look.watched_models import decoder_of, held_hooks

HOW_TO_READ = (
    "The effect of a part on a text is how much the text's loss grows without the part. Parts can stand in for one another, so the "
    "effects of single parts need not add up to the effect of all parts."
)
_COLUMNS = ["part", "kind", "memory", "layers", "text", "loss", "difference", "standard_error"]
_WIDTH, _HEIGHT_OF_ROW = 4.5, 0.24


@dataclass(frozen=True)
class PartEffect:
    """Losses of a model without one of its parts.

    Args:
        part: The part that was switched off; None for all added parts together.
        losses: Loss of each text without the part, in nats per predicted token.
        effects: For each text, the loss without the part minus the loss of the unchanged model.
    """

    part: Part | None
    losses: dict[str, float]
    effects: dict[str, Effect]

    @property
    def name(self) -> str:
        """Name of the part in tables."""
        return "all of them" if self.part is None else str(self.part)


@dataclass(frozen=True)
class LayerEffects:
    """Losses of a model without each of its parts.

    Args:
        losses: Loss of each text with the unchanged model, in nats per predicted token.
        tokens: Number of predicted tokens of each text.
        parts: Effects of single parts, in their order.
        without_all: Effect of all added parts together.
        base: Effects of the base's layers; empty unless `with_base` was true.
        whole_base: Whether `without_all` is the loss of the base, if the base's weights are unchanged.
    """

    losses: dict[str, float]
    tokens: dict[str, int]
    parts: list[PartEffect]
    without_all: PartEffect
    base: list[PartEffect]
    whole_base: bool

    @property
    def rows(self) -> list[PartEffect]:
        """Effects of single parts, of all added parts together, and of the base's layers, in this order."""
        return [*self.parts, self.without_all, *self.base]


def layer_effects(
    model: PreTrainedModel,
    texts: Sequence[TextRows],
    *,
    parts: Sequence[Part] | None = None,
    with_base: bool = False,
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> LayerEffects:
    """Measure the loss of texts without each added part, and compare it with the loss of the unchanged model.

    Layers before the first layer of a part compute the same with and without the part. They run once per batch if `can_share`
    allows it.

    Args:
        model: A model as in `added_parts`. It is in eval mode during the measurement.
        texts: Texts, as `text_rows` returns them.
        parts: Parts to switch off one by one, such as `chapter_parts` returns. Default: the added parts, and banks that several
            layers read.
        with_base: Whether to switch off each layer of the base as well. Default: False.
        batch_size: Rows per forward pass. Default: 4.
        progress: Called with the number of tokens read so far and the total number. Default: none.

    Raises:
        ValueError: For the reasons of `added_parts` and `read_rows`.
    """
    added = added_parts(model)
    several = [*added.parts, *added.banks] if parts is None else list(parts)
    of_base = added.base if with_base else ()
    variants: list[tuple[Part | None, tuple[Part, ...]]] = [
        *((part, (part,)) for part in several),
        (None, added.parts),
        *((part, (part,)) for part in of_base),
    ]
    total = sum(text.num_tokens for text in texts) * (2 + len(several) + len(of_base))
    advance = adding(progress, total)
    usual: dict[str, RowLosses] = {}
    changed: list[dict[str, RowLosses]] = [{} for _ in variants]
    starts = [min(layer for part in off for layer in part.layers) if can_share(model) else 0 for _, off in variants]
    for text in texts:
        of_usual: list[RowLosses] = []
        of_changed: list[list[RowLosses]] = [[] for _ in variants]
        for batch in text.batches(batch_size):
            with kept_outputs(model, {start - 1 for start in starts if start}) as kept:
                of_usual.append(read_rows(model, batch, batch_size=batch_size, progress=advance))
            for (_, off), start, of_variant in zip(variants, starts, of_changed, strict=True):
                with starting_at(model, start, kept), switched_off(model, off):
                    of_variant.append(read_rows(model, batch, batch_size=batch_size, progress=advance))
        usual[text.name] = RowLosses.joined(of_usual)
        for losses, of_variant in zip(changed, of_changed, strict=True):
            losses[text.name] = RowLosses.joined(of_variant)
    rows = [
        PartEffect(
            part,
            {name: of_text.mean for name, of_text in losses.items()},
            {name: effect_between(usual[name], of_text) for name, of_text in losses.items()},
        )
        for (part, _), losses in zip(variants, changed, strict=True)
    ]
    return LayerEffects(
        {name: of_text.mean for name, of_text in usual.items()},
        {name: int(of_text.tokens.sum()) for name, of_text in usual.items()},
        rows[: len(several)],
        rows[len(several)],
        rows[len(several) + 1 :],
        added.whole_base,
    )


def can_share(model: nn.Module) -> bool:
    """Return whether layers read nothing of earlier layers but the residual stream, so that passes can share earlier layers."""
    return not any(getattr(block, "takes", ()) or getattr(block, "gives", ()) for block in _layers(model))


@contextlib.contextmanager
def kept_outputs(model: nn.Module, layers: Iterable[int]) -> Iterator[dict[int, Any]]:
    """Keep the outputs of some layers in the pass that runs while the context is open, by index of the layer."""
    blocks = _layers(model)
    kept: dict[int, Any] = {}

    def keep(layer: int, module: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        kept[layer] = output

    with held_hooks() as hold:
        for layer in layers:
            hold(blocks[layer].register_forward_hook(partial(keep, layer)))
        yield kept


@contextlib.contextmanager
def starting_at(model: nn.Module, layer: int, kept: Mapping[int, Any]) -> Iterator[None]:
    """Start passes at a layer while the context is open: earlier layers return the kept output of another pass over the same rows.

    The model is one for which `can_share` is true. All layers compute if the layer is 0.
    """
    if layer == 0:
        yield
        return
    output = kept[layer - 1]

    def return_kept(*arguments: Any, **by_name: Any) -> Any:
        return output

    skipped = _layers(model)[:layer]
    before = [block.__dict__.get("forward") for block in skipped]
    try:
        for block in skipped:
            block.forward = return_kept
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for block, forward in zip(skipped, before, strict=True):
            if forward is None:
                del block.forward
            else:
                block.forward = forward


def _layers(model: nn.Module) -> list[Any]:
    return list(decoder_of(model).layers)


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
