"""Effects on the loss of texts when a model computes without an added part, one part at a time, and without all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from midus_hf.analysis.inside.added_parts import Part, added_parts, switched_off
from midus_hf.analysis.inside.loss_effects import Effect, effect_between
from midus_hf.analysis.inside.shared_start import can_share, kept_outputs, starting_at
from midus_hf.analysis.text_rows import RowLosses, TextRows, adding, read_rows


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
        parts: Effects of the added parts, in the order of layers, then of banks that several layers read.
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
        """Effects of the added parts, of all of these together, and of the base's layers, in this order."""
        return [*self.parts, self.without_all, *self.base]


def layer_effects(
    model: PreTrainedModel,
    texts: Sequence[TextRows],
    *,
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
        with_base: Whether to switch off each layer of the base as well. Default: False.
        batch_size: Rows per forward pass. Default: 4.
        progress: Called with the number of tokens read so far and the total number. Default: none.

    Raises:
        ValueError: For the reasons of `added_parts` and `read_rows`.
    """
    added = added_parts(model)
    several = [*added.parts, *added.banks]
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
    starts = [
        min(layer for part in parts for layer in part.layers) if can_share(model) else 0 for _, parts in variants
    ]
    for text in texts:
        of_usual: list[RowLosses] = []
        of_changed: list[list[RowLosses]] = [[] for _ in variants]
        for batch in text.batches(batch_size):
            with kept_outputs(model, {start - 1 for start in starts if start}) as kept:
                of_usual.append(read_rows(model, batch, batch_size=batch_size, progress=advance))
            for (_, parts), start, of_variant in zip(variants, starts, of_changed, strict=True):
                with starting_at(model, start, kept), switched_off(model, parts):
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
