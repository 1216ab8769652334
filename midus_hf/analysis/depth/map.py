"""What each token of one text reads of each key and slot, in one head (figure 5 of Mixture-of-Depths Attention)."""

from dataclasses import dataclass
from typing import Any

import torch

from midus_hf.analysis.depth.readers import DepthCall, DepthReader, ReadSlot, readers_of_depth, watch_depth
from midus_hf.analysis.depth.records import check_head
from midus_hf.analysis.watched_models import evaluating


@dataclass(frozen=True)
class DepthMap:
    """The shares of one head: what values are multiplied with.

    Args:
        layer: Index of the decoder layer.
        head: Number of the head.
        sequence: `[T, T]`, of each key of the sequence.
        depth: `[T, m]`, of each slot.
        slots: The slots.
    """

    layer: int
    head: int
    sequence: torch.Tensor
    depth: torch.Tensor
    slots: tuple[ReadSlot, ...]


def depth_map(model: Any, tokens: torch.Tensor, layer: int, head: int, memory: str | None = None) -> DepthMap:
    """Let a model read a text, and say what one head reads of it.

    Args:
        model: As for `readers_of_depth`; put in eval mode for the while.
        tokens: `[T]`, ids.
        layer: Index of the decoder layer.
        head: Number of the head.
        memory: Name of one of several memories that read the depth. Default: all.

    Raises:
        ValueError: As `readers_of_depth`, if there is no such head, or the model's attention does not say what its masks are.
    """
    (of_layer,) = readers_of_depth(model, memory, [layer])
    check_head(of_layer, head)
    found: list[DepthMap] = []

    def keep(reader: DepthReader, call: DepthCall) -> None:
        if reader.place == of_layer.place:
            of_slots, of_sequence = (part[0, head].double() for part in call.shares())  # [T, m] and [T]
            sequence = call.given["sequence"].shares(head)[0].double() * of_sequence[:, None]
            found.append(DepthMap(layer, head, sequence.cpu(), of_slots.cpu(), reader.slots))

    with evaluating(model), watch_depth(model, memory, keep):
        model(input_ids=tokens[None].to(model.device), use_cache=False)
    return found[0]
