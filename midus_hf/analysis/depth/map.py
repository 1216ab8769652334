"""Map of one head: what each token of a text reads of each key and slot (figure 5 of Mixture-of-Depths Attention)."""

from dataclasses import dataclass
from typing import Any

import torch

from midus_hf.analysis.depth.readers import DepthCall, DepthReader, ReadSlot, readers_of_depth, watch_depth
from midus_hf.analysis.depth.records import check_head
from midus_hf.analysis.watched_models import evaluating


@dataclass(frozen=True)
class DepthMap:
    """Attention shares of one head: the weights that values are multiplied with, float64, on the CPU.

    Args:
        layer: Index of the decoder layer.
        head: Index of the head.
        sequence: Share of each key of the sequence, `[T, T]`, a row per token.
        depth: Share of each slot, `[T, m]`, a row per token.
        slots: Slots that the columns of `depth` stand for.
    """

    layer: int
    head: int
    sequence: torch.Tensor
    depth: torch.Tensor
    slots: tuple[ReadSlot, ...]


def depth_map(model: Any, tokens: torch.Tensor, layer: int, head: int, memory: str | None = None) -> DepthMap:
    """Let a model read a text, and return the shares that one head gives to keys and slots.

    Args:
        model: A model as in `readers_of_depth`. It is in eval mode while it reads.
        tokens: Token ids of the text, `[T]`.
        layer: Index of the decoder layer.
        head: Index of the head.
        memory: Name of the memory that reads the depth. Default: memories of all names.

    Raises:
        ValueError: For the reasons of `readers_of_depth`; if the head does not exist; if the model's attention does not say what
            its masks are.
    """
    (of_layer,) = readers_of_depth(model, memory, [layer])
    check_head(of_layer, head)
    maps: list[DepthMap] = []

    def keep(reader: DepthReader, call: DepthCall) -> None:
        if reader.place == of_layer.place:
            of_slots, of_sequence = (part[0, head].double() for part in call.shares())  # [T, m] and [T]
            sequence = call.kwargs["sequence"].shares(head)[0].double() * of_sequence[:, None]
            maps.append(DepthMap(layer, head, sequence.cpu(), of_slots.cpu(), reader.slots))

    with evaluating(model), watch_depth(model, memory, keep):
        model(input_ids=tokens[None].to(model.device), use_cache=False)
    return maps[0]
