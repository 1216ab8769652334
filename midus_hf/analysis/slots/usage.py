"""How often each slot of a model's memories is retrieved."""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from midus_hf.analysis.watched_models import (
    MemoryPlace,
    bare_model,
    check_on_device,
    decoder_of,
    held_hooks,
    hosted_memories,
)
from midus_hf.config.plugins import load_offered
from midus_hf.memory.protocols import RetrievesSlots
from midus_hf.memory.registry import MEMORY_MODULES
from midus_hf.ops.dispatch.private_torch import is_in_backward

Place = TypeVar("Place", bound=Hashable)
"""What is counted apart: a memory, or a level of a bank."""


@dataclasses.dataclass(frozen=True)
class MemoryUsage:
    """How the heads of one memory share their lookups among their slots; all 0 if there was no lookup.

    Args:
        used: Share of the slots, of all heads, that were retrieved at all.
        perplexity: `exp(entropy) / N` of a head's distribution of lookups over its N slots, the mean over heads: 1 if
            all slots are retrieved equally often, 1 / N if it is always the same.
        largest: Share of a head's lookups that fall on one slot, the largest of all slots and heads.
    """

    used: float
    perplexity: float
    largest: float


class Usage:
    """Counts of retrieved slots.

    Args:
        counts: How often each head has retrieved each slot, `[H, N]`, int64, by memory.
    """

    def __init__(self, counts: dict[MemoryPlace, torch.Tensor]):
        self.counts = counts
        self._paused = False

    def count(self, place: MemoryPlace, slots: torch.Tensor) -> None:
        """Add retrievals; nothing waits for the device.

        Args:
            place: The memory.
            slots: `[..., H, k]`, int64.
        """
        counts = self.counts[place]
        chosen = slots.flatten(0, -3).transpose(0, 1).flatten(1).to(counts.device)  # [H, S * k]
        counts.scatter_add_(1, chosen, counts.new_ones(()).expand_as(chosen))

    def summary(self) -> dict[MemoryPlace, MemoryUsage]:
        """What the counts come to, by memory."""
        return summarise(self.counts)

    def reset(self) -> None:
        """Start again at zero."""
        for counts in self.counts.values():
            counts.zero_()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing while the context is open."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


def summarise(counts: Mapping[Place, torch.Tensor]) -> dict[Place, MemoryUsage]:
    """What counts of retrieved slots, opened chapters or fetched blocks come to.

    Args:
        counts: `[H, N]`, int64, by memory, or `[1, N]` by level of a bank.
    """
    return {place: _summarise_memory(of_memory) for place, of_memory in counts.items()}


def _summarise_memory(counts: torch.Tensor) -> MemoryUsage:
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
def record_usage(model: nn.Module, training_only: bool = False) -> Iterator[Usage]:
    """Count, while the context is open, the slots that each memory of a model retrieves.

    Every token counts that a memory reads, padding included, and once: what activation checkpointing computes again
    does not. Selection is done twice, so forward passes take longer. What `torch.compile` has compiled, of this model
    or another, runs uncompiled while the context is open: compiled code does not call a hook that came after it.

    Args:
        model: A causal language model whose decoder has `layers`, compiled or not, or what accelerate or PEFT has
            wrapped around one. Its memory modules have a hook more while the context is open, and nothing else.
        training_only: Whether what a memory reads in eval mode is left out. Default: false.

    Raises:
        ValueError: If the model has no memory that retrieves slots, or one whose parameters are offloaded.
    """
    hosts = hosted_memories(model, RetrievesSlots)
    if not hosts:
        model_type = bare_model(model).config.model_type
        others = ", ".join(uncounted_memories(model))
        raise ValueError(
            f"this {model_type} model has no memory that retrieves slots{others and f', only memory of type {others}'}; "
            f"expected an upscaled model with memory of one of the types: {', '.join(types_with_slots())}."
        )
    for hosted in hosts:
        check_on_device(hosted.memory, hosted.place)
    usage = Usage({hosted.place: _no_counts(hosted.module) for hosted in hosts})
    with held_hooks() as hold:
        for hosted in hosts:
            for module in hosted.modules:
                hold(module.register_forward_hook(_counter(usage, hosted.place, training_only)))
        yield usage


def uncounted_memories(model: nn.Module) -> dict[str, list[int]]:
    """The layers of those memories that retrieve no slots, by their type: `record_usage` has nothing to count there.

    Args:
        model: As `record_usage` takes it.
    """
    layers: dict[str, list[int]] = {}
    for layer, block in enumerate(decoder_of(model).layers):
        for module in block.modules():
            memory_type = getattr(module, "memory_type", None)  # of the code that a checkpoint brought as well
            if isinstance(memory_type, str) and not isinstance(module, RetrievesSlots):
                layers.setdefault(memory_type, []).append(layer)
    return layers


def types_with_slots() -> list[str]:
    """Return the sorted names of the registered types whose memories are a `RetrievesSlots`, those of other packages included."""
    return _types_with("retrieve")


def types_whose_slots_add() -> list[str]:
    """Return the sorted names of the registered types whose memories are an `AddsSlots`."""
    return _types_with("slot_outputs")


def counted_types() -> list[str]:
    """Return the sorted names of the registered types of which `midus look usage` counts something: slots, chapters or blocks."""
    fetching = [name for name, module in MEMORY_MODULES.items() if "fetched" in module.asks]
    return sorted({*types_with_slots(), *_types_with("attention_mass"), *fetching})


def _types_with(method: str) -> list[str]:
    load_offered("midus_hf.memories", refuse=False)
    return sorted(name for name, module in MEMORY_MODULES.items() if hasattr(module, method))


def _no_counts(memory: Any) -> torch.Tensor:
    """Return zeros `[H, N]`, int64, on the device of a memory."""
    device = next(memory.parameters()).device
    return torch.zeros(memory.num_heads, memory.num_slots, dtype=torch.int64, device=device)


def _counter(
    usage: Usage, place: MemoryPlace, training_only: bool
) -> Callable[[Any, tuple[torch.Tensor, ...], torch.Tensor], None]:
    """A forward hook that counts what a memory has retrieved.

    It runs after the forward pass, so that the weights that autocast keeps were cast for the pass, with a gradient.
    """

    def count(memory: Any, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not (is_in_backward() or usage._paused) and (memory.training or not training_only):
            with torch.no_grad():
                _, slots = memory.retrieve(arguments[0])
                usage.count(place, slots)

    return count
