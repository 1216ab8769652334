"""How often memories retrieve each slot, tokens open each chapter, and texts fetch each block."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from midus_hf.config.errors import RequestError
from midus_hf.look.page import Panel, Row, TextTable, curves, table_of
from midus_hf.memories.hierarchical.options import GENERIC
from midus_hf.memories.hosting.parts import decoder_of
from midus_hf.models.view import hosted_memories, lacking, temporary_hooks
from midus_hf.ops.dispatch.private_torch import is_in_backward


@dataclasses.dataclass(frozen=True)
class MemoryUsage:
    """Summary of how one memory's lookups spread over its slots; all fields are 0 if there was no lookup.

    Args:
        used: Share of the slots of all heads that were retrieved at least once.
        perplexity: `exp(entropy) / N` of a head's lookups over its N slots, averaged over heads: 1 if all slots are retrieved equally
            often, 1 / N if every lookup retrieves the same one.
        largest: Largest share of a head's lookups that falls on a single slot, over all heads.
    """

    used: float
    perplexity: float
    largest: float


Counts = dict[str, torch.Tensor]  # counts `[H, N]`, int64, by memory or level of a bank, as `record_usage` yields them


def summarise(counts: torch.Tensor) -> MemoryUsage:
    """Return the usage of a memory or level, from counts `[H, N]`, int64, of what was read."""
    wide = counts.double().cpu()  # [H, N]
    total = wide.sum(-1, keepdim=True)
    if not total.any():
        return MemoryUsage(0.0, 0.0, 0.0)
    shares = wide / total.clamp(min=1)
    entropy = torch.special.entr(shares).sum(-1)  # [H]
    return MemoryUsage(
        used=(wide > 0).double().mean().item(),
        perplexity=(entropy.exp() / wide.shape[-1]).mean().item(),
        largest=shares.max().item(),
    )


@contextlib.contextmanager
def record_usage(model: nn.Module) -> Iterator[Counts]:
    """Count, in the context, retrieved slots, opened chapters and fetched blocks.

    Every token counts once, also under activation checkpointing; padding counts only for retrieved slots. Shared chapters and the
    generic memory of a bank are left out. Slots and chapters are chosen a second time for the count, so forward passes take longer.
    All compiled models run uncompiled, since compiled code does not call hooks added later.

    Args:
        model: A causal language model whose decoder has `layers`. Its memories have an additional hook within the context.

    Yields:
        Counts of slots, `[H, N]`, int64, by the memory's layer and name, such as `3 ultramem`; of routed chapters, `[1, N]`; and of
        blocks, `[1, N]`, by the bank's name and level, such as `hier-ffn level 2`.

    Raises:
        RequestError: If the model has nothing to count, or parameters of a memory are offloaded; within the context, if a pass is
            called with `memory_blocks`, which does not name the blocks' nodes.
    """
    counts: Counts = {}
    decoder = decoder_of(model)
    with temporary_hooks() as hold:
        for hosted in hosted_memories(model, "retrieve", "route"):
            memory = hosted.module
            has_slots = hasattr(hosted.module, "retrieve")
            heads, choices = (
                (memory.num_heads, memory.num_slots) if has_slots else (1, memory.num_chapters - memory.num_shared)
            )
            device = next(memory.parameters()).device
            counts[hosted.place] = torch.zeros(heads, choices, dtype=torch.int64, device=device)
            if has_slots:
                hold(memory.register_forward_hook(partial(_count_slots, counts[hosted.place])))
            else:
                hook = partial(_count_chapters, counts[hosted.place])
                hold(memory.register_forward_pre_hook(hook, with_kwargs=True))
        levels: dict[str, int] = {}
        for name, layout in getattr(getattr(decoder, "own_banks", None), "layouts", {}).items():
            for level in layout.levels:
                levels[f"{name} level {level}"] = level
                nodes = layout.blocks.nodes(level)
                counts[f"{name} level {level}"] = torch.zeros(1, nodes, dtype=torch.int64)
        if levels:
            hold(decoder.register_forward_hook(partial(_count_blocks, counts, levels), with_kwargs=True))
        if not counts:
            raise lacking(model, "retrieves slots, reads chapters or fetches blocks")
        yield counts


def _add(counts: torch.Tensor, chosen: torch.Tensor, times: torch.Tensor | None = None) -> None:
    """Add what each head chose, `[H, S]`, to counts `[H, N]`, each once or so many `times`."""
    added = counts.new_ones(()).expand_as(chosen) if times is None else times.to(counts.device)
    counts.scatter_add_(1, chosen.to(counts.device), added)


@torch.no_grad()
def _count_slots(counts: torch.Tensor, memory: Any, arguments: tuple[Any, ...], output: Any) -> None:
    """Count the retrieved slots after the pass, which would else use casts that autocast cached here."""
    if not is_in_backward():  # where activation checkpointing recomputes the pass
        slots = memory.retrieve(arguments[0])[1]  # [..., H, k]
        _add(counts, slots.flatten(0, -3).transpose(0, 1).flatten(1))


@torch.no_grad()
def _count_chapters(counts: torch.Tensor, memory: Any, arguments: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Count the chapters that tokens will open, before the pass changes the routing's state."""
    if is_in_backward() or not arguments[0].numel():
        return
    routing = memory.route(arguments[0], **{name: kwargs.get(name) for name in ("tokens", "state")})
    torch.clear_autocast_cache()  # of casts without a gradient, which the pass would use
    tokens = routing.pooled.counts.to(torch.int64).unsqueeze(-1).expand_as(routing.chosen)  # [B, U, k]
    _add(counts, (routing.chosen - memory.num_shared).flatten()[None], tokens.flatten()[None])


def _count_blocks(
    counts: Counts,
    levels: Mapping[str, int],
    decoder: nn.Module,
    arguments: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    """Count the tokens of each row, except padding, for the blocks on the row's path."""
    if kwargs.get("memory_blocks") is not None:
        raise RequestError(
            "memory_blocks is given, which does not name the blocks' nodes; expected memory_ids while usage is recorded."
        )
    paths = kwargs.get("memory_ids")
    if paths is None or is_in_backward():
        return
    tokens = arguments[0] if arguments else kwargs.get("input_ids")
    tokens = kwargs["inputs_embeds"] if tokens is None else tokens
    rows, width = tokens.shape[:2]
    mask = kwargs.get("attention_mask")
    lengths = torch.full((rows,), width)
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        lengths = (mask[:, -width:] != 0).sum(-1).cpu()  # with a cache, the mask covers earlier passes too
    paths = paths.cpu().long()
    in_tree = paths[:, 0] != GENERIC
    for memory_name, level in levels.items():
        _add(counts[memory_name], paths[in_tree, level - 1][None], lengths[in_tree][None])


def usage_rows(counts: Mapping[str, Counts]) -> list[dict[str, Any]]:
    """Return a row per text and memory, from counts by the text's name."""
    return [
        {"text": text, "memory": memory_name, "slots": one.shape[-1], **vars(summarise(one))}
        for text, memories in counts.items()
        for memory_name, one in memories.items()
    ]


def usage_table(rows: list[dict[str, Any]]) -> TextTable:
    """Return a table of the rows of `usage_rows`."""
    columns = {"text": "{text}", "layer or bank": "{memory}", "slots": "{slots:,}", "used": "{used:.1%}"}
    shares = {"perplexity / N": "{perplexity:.1%}", "largest share": "{largest:.2%}"}
    return table_of("Slots, chapters and blocks used", rows, {**columns, **shares})


def usage_finding(rows: list[dict[str, Any]]) -> str:
    """Return in a sentence how much is used, and the share of the most used slot."""
    used = [row["used"] for row in rows]
    most = max(rows, key=lambda row: row["largest"])
    return (
        f"Of each memory's slots, chapters or blocks, texts use {min(used):.0%} to {max(used):.0%}; the most used one gets "
        f"{most['largest']:.1%} of what its head reads ({_labelled(most['memory'])}, {most['text']})."
    )


def _labelled(memory: str) -> str:
    """Return the name of a memory with its layer's number, or of a level of a bank."""
    return f"layer {memory}" if memory[0].isdigit() else memory


def every_count(counts: Mapping[str, Counts]) -> Iterator[Row]:
    """Yield a row per text, memory, head and slot, chapter or block, also for slots that were never used."""
    for text, memories in counts.items():
        for memory_name, one in memories.items():
            for head, numbers in enumerate(one.tolist()):
                for number, count in enumerate(numbers):
                    yield {"text": text, "memory": memory_name, "head": head, "number": number, "count": count}


def usage_panels(counts: Mapping[str, Counts]) -> dict[str, Panel]:
    """Return a panel per text with a `usage_curve` per memory."""
    panels = {}
    highest = max(usage_curve(one)[0] for memories in counts.values() for one in memories.values())
    ticks = [0, *(digit * 10**power for power in range(6) for digit in (1, 2, 5) if digit * 10**power <= highest)]
    for text, memories in counts.items():
        lines = {}
        for memory_name, one in memories.items():
            curve = usage_curve(one)
            lines[_labelled(memory_name)] = ([rank / len(curve) for rank in range(1, len(curve) + 1)], curve)
        x = "share of the slots, most used first"
        y = "uses, in multiples of the mean"
        panels[text] = curves(lines, x, y, yscale="symlog", yticks=ticks)
    return panels


def usage_curve(counts: torch.Tensor) -> list[float]:
    """Return the use of slots in multiples of the mean, most used first, averaged over heads."""
    wide = counts.double().cpu()
    mean = wide.mean(-1, keepdim=True).clamp(min=1 / wide.shape[-1])
    return (wide / mean).sort(-1, descending=True).values.mean(0).tolist()
