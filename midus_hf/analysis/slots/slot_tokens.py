"""Tokens of the vocabulary that the values of a memory's slots are nearest to, read through the model's own head."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from midus_hf.analysis.inside.vocabulary_head import NearToken, VocabularyHead, check_top, in_words, on_its_way
from midus_hf.analysis.page import TableOfWords
from midus_hf.analysis.slots.usage import Usage, types_whose_slots_add
from midus_hf.analysis.watched_models import (
    HostedMemory,
    MemoryPlace,
    check_hosted,
    decoder_of,
    hosted_memories,
    named,
)
from midus_hf.memory.protocols import AddsSlots


@dataclass(frozen=True)
class NearSlot:
    """The tokens nearest to what a slot adds.

    Args:
        head: Index of the head that reads the slot; None if the slot adds the same through every head and no head was chosen.
        slot: Index of the slot.
        part: Index of the projection that the slot is read through; None if the memory has one projection.
        share: Share of lookups that fall on the slot: lookups of `head`, or of all heads if `head` is None. None if usage is
            not known.
        norm: Euclidean norm of what the slot adds.
        tokens: Tokens with the highest logits; empty if the slot adds zero.
    """

    head: int | None
    slot: int
    part: int | None
    share: float | None
    norm: float
    tokens: list[NearToken]


def memory_of_slots(model: nn.Module, layer: int, name: str | None = None) -> HostedMemory:
    """Return the memory of a layer that retrieves slots and adds their values.

    Args:
        model: A causal language model whose decoder has `layers`. It may be compiled, or wrapped by accelerate or PEFT.
        layer: Index of the decoder layer.
        name: Name of the memory, if the layer has several. Default: the only one.

    Raises:
        ValueError: If the model or the layer has no memory whose slots add values, if no memory of the layer has the name, if
            several are left to choose from, or if a memory of the layer is offloaded.
    """
    types = ", ".join(types_whose_slots_add())
    lack = f"no memory whose slots add values; expected one upscaled with memory of one of the types: {types}"
    hosts = hosted_memories(model, AddsSlots, lack, whole=False)
    here = [hosted for hosted in hosts if hosted.layer == layer]
    if not here:
        with_slots = ", ".join(map(str, dict.fromkeys(hosted.layer for hosted in hosts)))
        raise ValueError(f"layer is {layer}; expected one with a memory of slots: {with_slots}.")
    check_hosted(model, here, lack)
    here = named(here, name)
    if len(here) > 1:
        names = ", ".join(hosted.name for hosted in here)
        raise ValueError(f"layer {layer} has memories {names}; expected one of them. Pass memory.")
    return here[0]


def memories_of_slots(model: nn.Module) -> list[HostedMemory]:
    """Return all memories of a model that retrieve slots and add their values, in the order of layers."""
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
    """Return the tokens nearest to what each slot adds. This is a probe, not a proof.

    Each slot is treated as the only one that is read, and as the last addition to the residual stream. What the slot adds takes
    the path of the memory's output to the residual stream, then the model's final norm and head (`VocabularyHead`). Everything
    that depends on the reading token is left out: the slot's weight (which may be negative in memory of type ultramem), gates,
    pre-values, and the residual stream itself.

    Args:
        model: A model as in `memory_of_slots`.
        tokenizer: The model's tokenizer.
        layer: Index of the decoder layer.
        head: Index of a head of the memory. Default: all heads.
        slots: Indices of the slots to read. Default: the most used slots, according to `usage`.
        usage: Usage of this model, recorded by `record_usage`. Default: not known; `slots` is required then.
        most: Number of slots to read if `slots` is None. Default: 10.
        top: Tokens per slot. Default: 10.
        memory: Name of the memory, if the layer has several. Default: the only one.

    Raises:
        ValueError: For the reasons of `memory_of_slots`; if `head` or a slot does not exist; if `most` or `top` is less than 1.
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
    """Return the share of lookups per slot: `[H, N]` if heads add different values, else `[1, N]` for one head or all."""
    if not by_head:
        counts = counts.sum(0, keepdim=True) if head is None else counts[head : head + 1]
    wide = counts.double().cpu()
    return wide / wide.sum(-1, keepdim=True).clamp(min=1)


def _most_used(shares: torch.Tensor, rows: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Return pairs of a row of `rows` and a slot, most used first; slots that are never used are left out."""
    used = shares[list(rows)] if len(shares) > 1 else shares
    best = used.flatten().topk(min(most, used.numel()))
    pairs = [
        divmod(flat_index, used.shape[-1])
        for flat_index, share in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        if share
    ]
    return [(rows[row], slot) for row, slot in pairs]


def slots_table(near: Sequence[NearSlot], memory_place: MemoryPlace) -> TableOfWords:
    """Return a table of the tokens nearest to each slot."""
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
    title = f"Tokens nearest to what slots add in layer {memory_place} (a probe, no proof)"
    return TableOfWords(title, ["head", "slot", "used", "norm", "tokens"], rows)
