"""What texts lose without each part that was added to a model, one part at a time, and without all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from midus_hf.analysis.inside.added_parts import Part, added_parts, switched_off
from midus_hf.analysis.inside.loss_effects import Effect, effect_between
from midus_hf.analysis.inside.shared_start import can_share, kept_outputs, starting_at
from midus_hf.analysis.text_rows import RowLosses, TextRows, adding, read_rows


@dataclass(frozen=True)
class PartEffect:
    """A model without a part of it.

    Args:
        part: What was switched off; None for all that was added.
        losses: Of each text without it, in nats per predicted token.
        effects: By text: these losses minus those of the model as it is.
    """

    part: Part | None
    losses: dict[str, float]
    effects: dict[str, Effect]

    @property
    def name(self) -> str:
        """What tables call it."""
        return "all of them" if self.part is None else str(self.part)


@dataclass(frozen=True)
class LayerEffects:
    """A model without each of its parts.

    Args:
        losses: Of each text as the model is, in nats per predicted token.
        tokens: That were predicted of each text.
        parts: That were added, in the order of layers; behind them banks that several layers read.
        without_all: The model without all that was added.
        base: Layers of the base, if they were asked for.
        whole_base: Whether `without_all` is the base, as far as its weights are the base's.
    """

    losses: dict[str, float]
    tokens: dict[str, int]
    parts: list[PartEffect]
    without_all: PartEffect
    base: list[PartEffect]
    whole_base: bool

    @property
    def rows(self) -> list[PartEffect]:
        """All of them."""
        return [*self.parts, self.without_all, *self.base]


def layer_effects(
    model: PreTrainedModel,
    texts: Sequence[TextRows],
    *,
    with_base: bool = False,
    batch_size: int = 4,
    progress: Callable[[int, int], None] | None = None,
) -> LayerEffects:
    """Measure the loss on texts without each part that was added, and compare it with the loss as it is.

    Layers in front of the first that a part is of compute what they do with it, so they compute once for each batch.

    Args:
        model: As for `added_parts`; put in eval mode for the while.
        texts: From `text_rows`.
        with_base: Whether to leave out each layer of the base as well. Default: false.
        batch_size: Rows per forward pass. Default: 4.
        progress: Called with the tokens read so far, and of all. Default: none.

    Raises:
        ValueError: As `added_parts` and `read_rows`.
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
    told = adding(progress, total)
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
                of_usual.append(read_rows(model, batch, batch_size=batch_size, progress=told))
            for (_, parts), start, found in zip(variants, starts, of_changed, strict=True):
                with starting_at(model, start, kept), switched_off(model, parts):
                    found.append(read_rows(model, batch, batch_size=batch_size, progress=told))
        usual[text.name] = RowLosses.joined(of_usual)
        for losses, found in zip(changed, of_changed, strict=True):
            losses[text.name] = RowLosses.joined(found)
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
