"""How often each slot of a model's memories is retrieved."""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from accelerate.utils import extract_model_from_parallel
from torch import nn

from midus_hf.analysis.slots.counted_types import types_with_slots
from midus_hf.analysis.slots.memory_place import MemoryPlace, place_of
from midus_hf.memory.protocols import RetrievesSlots
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
    bare: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    memories: list[
        tuple[MemoryPlace, Any]
    ] = [  # a memory that PEFT has copied is here more than once: one copy is called
        (place_of(layer, path), module)
        for layer, block in enumerate(bare.get_decoder().layers)
        for path, module in block.named_modules()
        if isinstance(module, RetrievesSlots)
    ]
    if not memories:
        others = ", ".join(uncounted_memories(bare))
        raise ValueError(
            f"this {bare.config.model_type} model has no memory that retrieves slots{others and f', only memory of type {others}'}; "
            f"expected an upscaled model with memory of one of the types: {', '.join(types_with_slots())}."
        )
    for place, memory in memories:
        if any(parameter.device.type == "meta" for parameter in memory.parameters()):
            raise ValueError(
                f"the memory of layer {place} is offloaded; expected its parameters on a device. Load the model whole."
            )
    usage = Usage(
        {
            place: torch.zeros(memory.num_heads, memory.num_slots, dtype=torch.int64, device=_device_of(memory))
            for place, memory in memories
        }
    )
    handles = [memory.register_forward_hook(_counter(usage, place, training_only)) for place, memory in memories]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield usage
    finally:
        for handle in handles:
            handle.remove()


def uncounted_memories(model: nn.Module) -> dict[str, list[int]]:
    """The layers of those memories that retrieve no slots, by their type: `record_usage` has nothing to count there.

    Args:
        model: As `record_usage` takes it.
    """
    bare: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    layers: dict[str, list[int]] = {}
    for layer, block in enumerate(bare.get_decoder().layers):
        for module in block.modules():
            memory_type = getattr(module, "memory_type", None)  # of the code that a checkpoint brought as well
            if isinstance(memory_type, str) and not isinstance(module, RetrievesSlots):
                layers.setdefault(memory_type, []).append(layer)
    return layers


def _device_of(memory: nn.Module) -> torch.device:
    return next(memory.parameters()).device


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
