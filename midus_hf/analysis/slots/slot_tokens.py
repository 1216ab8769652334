"""Which tokens of the vocabulary the values of a memory's slots are nearest to, by the model's own head."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from midus_hf.analysis.inside.vocabulary_head import NearToken, VocabularyHead, check_top, in_words, on_its_way
from midus_hf.analysis.slots.usage import Usage, types_whose_slots_add
from midus_hf.analysis.table_of_words import TableOfWords
from midus_hf.analysis.watched_models import (
    HostedMemory,
    MemoryPlace,
    bare_model,
    decoder_of,
    hosted_memories,
    whole_and_named,
)
from midus_hf.memory.protocols import AddsSlots


@dataclass(frozen=True)
class NearSlot:
    """The tokens nearest to what a slot adds.

    Args:
        head: That reads it; None where it adds the same whichever head does.
        slot: Its number.
        part: Which of the projections that it may be read through; None where there is one.
        share: Of the lookups of the head, or of all heads, that fall on it; None where usage is not known.
        norm: Of what it adds.
        tokens: With the highest logits. Empty where it adds zero.
    """

    head: int | None
    slot: int
    part: int | None
    share: float | None
    norm: float
    tokens: list[NearToken]


def memory_of_slots(model: nn.Module, layer: int, name: str | None = None) -> HostedMemory:
    """The memory of a layer that retrieves slots and adds their values.

    Args:
        model: A causal language model whose decoder has `layers`, compiled or not, or what accelerate or PEFT has wrapped around one.
        layer: Index of the decoder layer.
        name: Of one of several memories of the layer. Default: the only one.

    Raises:
        ValueError: If the model has none, the layer none or several, or it is offloaded.
    """
    found = memories_of_slots(model)
    if not found:
        model_type = bare_model(model).config.model_type
        raise ValueError(
            f"this {model_type} model has no memory whose slots add values; expected one upscaled with memory of one of "
            f"the types: {', '.join(types_whose_slots_add())}."
        )
    here = [hosted for hosted in found if hosted.layer == layer]
    if not here:
        with_slots = ", ".join(map(str, dict.fromkeys(hosted.layer for hosted in found)))
        raise ValueError(f"layer is {layer}; expected one with a memory of slots: {with_slots}.")
    here = whole_and_named(here, name)
    if len(here) > 1:
        names = ", ".join(hosted.name for hosted in here)
        raise ValueError(f"layer {layer} has memories {names}; expected one of them. Pass memory.")
    return here[0]


def memories_of_slots(model: nn.Module) -> list[HostedMemory]:
    """Return all memories that retrieve slots and add their values, in the order of layers.

    Args:
        model: As for `memory_of_slots`.
    """
    return hosted_memories(model, AddsSlots)


@torch.no_grad()
def slot_tokens(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    layer: int,
    *,
    head: int | None = None,
    slots: Sequence[int] | None = None,
    usage: Usage | None = None,
    most: int = 10,
    top: int = 10,
    memory: str | None = None,
) -> list[NearSlot]:
    """Read what slots add, were each all that is read and the last thing that is added: a probe, and no proof.

    What a slot adds goes the way of the memory's output to the residual stream, then through the model's final norm and its head
    (`VocabularyHead`). Left out are what depends on the token that reads: its weight, which in memory of type ultramem may be
    negative, gates and pre-values, and the residual stream that it is added to.

    Args:
        model: As for `memory_of_slots`.
        tokenizer: Of the model.
        layer: Index of the decoder layer.
        head: One of several. Default: all.
        slots: Their numbers. Default: the most used ones.
        usage: From `record_usage`, of this model. Default: not known; then `slots` are given.
        most: Slots that are read, if none are given. Default: 10.
        top: Tokens per slot. Default: 10.
        memory: Name of one of several memories of the layer. Default: the only one.

    Raises:
        ValueError: As `memory_of_slots`; if there is no such head or slot, or a number is less than 1.
    """
    check_top(top)
    if most < 1:
        raise ValueError(f"most is {most}; expected at least 1.")
    hosted = memory_of_slots(model, layer, memory)
    module = hosted.module
    if head is not None and not 0 <= head < module.num_heads:
        raise ValueError(f"head is {head}; expected a number from 0 to {module.num_heads - 1}.")
    for slot in slots or ():
        if not 0 <= slot < module.num_slots:
            raise ValueError(f"slot is {slot}; expected a number from 0 to {module.num_slots - 1}.")
    assert slots is not None or usage is not None, "slots are given, or known by their usage"
    shares = None if usage is None else _shares(usage.counts[hosted.place], head, module.values_by_head)
    rows = range(module.num_heads) if module.values_by_head and head is None else [head or 0]
    if slots is not None:
        chosen = [(row, slot) for row in rows for slot in slots]
    else:
        assert shares is not None
        chosen = _most_used(shares, rows, most)
    tables = {id(reader): shared for reader, shared in decoder_of(model).table_readers()}.get(id(hosted.memory))
    lens = VocabularyHead.of(model, tokenizer, top)
    device = next(module.parameters()).device
    near = []
    for row, slot in chosen:
        outputs = module.slot_outputs(torch.tensor([slot], device=device), row, tables=tables)[0]  # [E, D]
        share = None if shares is None else float(shares[row if module.values_by_head else 0, slot])
        for part, added in enumerate(outputs):
            norm = added.float().norm().item()
            on_way = on_its_way(hosted.block, hosted.name, added[None])
            near.append(
                NearSlot(
                    row if module.values_by_head else head,
                    slot,
                    part if len(outputs) > 1 else None,
                    share,
                    norm,
                    lens.nearest(next(lens.logits(on_way))[0]) if norm else [],
                )
            )
    return near


def _shares(counts: torch.Tensor, head: int | None, by_head: bool) -> torch.Tensor:
    """Shares of lookups: `[H, N]` of each head where heads add something else, otherwise `[1, N]`, of one head or of all."""
    if not by_head:
        counts = counts.sum(0, keepdim=True) if head is None else counts[head : head + 1]
    wide = counts.double().cpu()
    return wide / wide.sum(-1, keepdim=True).clamp(min=1)


def _most_used(shares: torch.Tensor, rows: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Rows of heads and slots, the most used first; those that are never used are left out."""
    used = shares[list(rows)] if len(shares) > 1 else shares
    best = used.flatten().topk(min(most, used.numel()))
    places = [
        divmod(place, used.shape[-1])
        for place, share in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        if share
    ]
    return [(rows[row], slot) for row, slot in places]


def slots_table(near: Sequence[NearSlot], place: MemoryPlace) -> TableOfWords:
    """The tokens nearest to each slot."""
    rows = [
        [
            "" if of_slot.head is None else str(of_slot.head),
            str(of_slot.slot) if of_slot.part is None else f"{of_slot.slot}.{of_slot.part}",
            "" if of_slot.share is None else f"{of_slot.share:.2%}",
            f"{of_slot.norm:.3g}",
            in_words(of_slot.tokens) or "adds nothing",
        ]
        for of_slot in near
    ]
    title = f"Tokens nearest to what slots add in layer {place} (a probe, no proof)"
    return TableOfWords(title, ["head", "slot", "used", "norm", "tokens"], rows)
