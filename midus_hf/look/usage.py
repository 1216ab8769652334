"""Usage of slots and chapters: how often a model's memories retrieve each slot, and how often tokens open each chapter."""

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from midus_hf.config.plugins import load_offered
from midus_hf.look.chapters import memories_of_chapters
from midus_hf.look.watched_models import MemoryPlace, decoder_of, held_hooks, hosted_memories
from midus_hf.memory.protocols import RetrievesSlots
from midus_hf.memory.registry import MEMORY_MODULES
from midus_hf.memory.routing.pooling import Routing
from midus_hf.ops.dispatch.private_torch import is_in_backward

# A key under which retrievals are counted: a memory, or a level of a bank.
Place = TypeVar("Place", bound=Hashable)


@dataclasses.dataclass(frozen=True)
class MemoryUsage:
    """Summary of how one memory's lookups spread over its slots; all fields are 0 if there was no lookup.

    Args:
        used: Share of the slots of all heads that were retrieved at least once.
        perplexity: `exp(entropy) / N` of a head's distribution of lookups over its N slots, averaged over heads: 1 if all
            slots are retrieved equally often, 1 / N if every lookup retrieves the same slot.
        largest: Largest share of a head's lookups that falls on a single slot, over all heads.
    """

    used: float
    perplexity: float
    largest: float


class Usage:
    """Counts of retrieved slots.

    Args:
        counts: Number of times that each head retrieved each slot, `[H, N]`, int64, per memory.
    """

    def __init__(self, counts: dict[MemoryPlace, torch.Tensor]):
        self.counts = counts
        self._paused = False

    def count(self, memory_place: MemoryPlace, slots: torch.Tensor) -> None:
        """Add retrievals to the counts, without waiting for the device.

        Args:
            memory_place: Place of the memory that retrieved the slots.
            slots: Retrieved slots, `[..., H, k]`, int64.
        """
        counts = self.counts[memory_place]
        chosen = slots.flatten(0, -3).transpose(0, 1).flatten(1).to(counts.device)  # [H, S * k]
        counts.scatter_add_(1, chosen, counts.new_ones(()).expand_as(chosen))

    def summary(self) -> dict[MemoryPlace, MemoryUsage]:
        """Return the usage of each memory's slots."""
        return summarise(self.counts)

    def reset(self) -> None:
        """Set all counts to zero."""
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
    """Return the usage per memory or level, from counts of retrieved slots, opened chapters or fetched blocks.

    Args:
        counts: Counts `[H, N]`, int64, per memory, or `[1, N]` per level of a bank.
    """
    return {key: _summarise_memory(of_memory) for key, of_memory in counts.items()}


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

    Every token that a memory reads counts once, including padding; activation checkpointing does not count it again. Slots are
    selected a second time for the count, so forward passes take longer. While the context is open, compiled models run
    uncompiled, this one and all others: compiled code does not call hooks that were added after compilation.

    Args:
        model: A causal language model whose decoder has `layers`. It may be compiled, or wrapped by accelerate or PEFT. Its
            memory modules have an additional hook while the context is open; nothing else changes.
        training_only: Whether to ignore what a memory reads in eval mode. Default: False.

    Raises:
        ValueError: If the model has no memory that retrieves slots, or if the parameters of one are offloaded.
    """
    others = ", ".join(uncounted_memories(model))
    lack = (
        f"no memory that retrieves slots{others and f', only memory of type {others}'}; "
        f"expected an upscaled model with memory of one of the types: {', '.join(types_with_slots())}"
    )
    hosts = hosted_memories(model, RetrievesSlots, lack)
    usage = Usage({hosted.place: _no_counts(hosted.module) for hosted in hosts})
    with held_hooks() as hold:
        for hosted in hosts:
            for module in hosted.modules:
                hold(module.register_forward_hook(_counter(usage, hosted.place, training_only)))
        yield usage


def uncounted_memories(model: nn.Module) -> dict[str, list[int]]:
    """Return the layers with memories that retrieve no slots, by type of memory. `record_usage` counts nothing there."""
    layers: dict[str, list[int]] = {}
    for layer, block in enumerate(decoder_of(model).layers):
        for module in block.modules():
            memory_type = getattr(module, "memory_type", None)  # also of classes that a checkpoint carries
            if isinstance(memory_type, str) and not isinstance(module, RetrievesSlots):
                layers.setdefault(memory_type, []).append(layer)
    return layers


def types_with_slots() -> list[str]:
    """Return the sorted names of registered types of memory that retrieve slots, including types from other packages."""
    return _types_with("retrieve")


def counted_types() -> list[str]:
    """Return the sorted names of registered types of memory for which `midus look usage` counts slots, chapters or blocks."""
    fetching = [name for name, module in MEMORY_MODULES.items() if "fetched" in module.context]
    return sorted({*types_with_slots(), *_types_with("route"), *fetching})


def _types_with(method: str) -> list[str]:
    load_offered("midus_hf.memories", refuse=False)
    return sorted(name for name, module in MEMORY_MODULES.items() if hasattr(module, method))


def _no_counts(memory: Any) -> torch.Tensor:
    """Return zeros `[H, N]`, int64, on the device of a memory."""
    device = next(memory.parameters()).device
    return torch.zeros(memory.num_heads, memory.num_slots, dtype=torch.int64, device=device)


def _counter(
    usage: Usage, memory_place: MemoryPlace, training_only: bool
) -> Callable[[Any, tuple[torch.Tensor, ...], torch.Tensor], None]:
    """Return a forward hook that counts the slots that a memory has retrieved.

    The hook runs after the pass: if it retrieved before, without gradients, autocast would cache casts of the weights that have
    no gradient, and the pass would use them.
    """

    def count(memory: Any, arguments: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if not (is_in_backward() or usage._paused) and (memory.training or not training_only):
            with torch.no_grad():
                _, slots = memory.retrieve(arguments[0])
                usage.count(memory_place, slots)

    return count


@contextlib.contextmanager
def record_chapter_usage(model: nn.Module) -> Iterator[Usage]:
    """Count, while the context is open, how many tokens open each routed chapter of each memory of chapters.

    Padding is not counted. Shared chapters are left out, since every token reads them. Routing is computed a second time for the
    count. While the context is open, compiled models run uncompiled, this one and all others.

    Args:
        model: A model as in `memories_of_chapters`. Its memories have an additional hook while the context is open.

    Raises:
        ValueError: For the reasons of `memories_of_chapters`.
    """
    hosts = memories_of_chapters(model)
    usage = Usage(
        {
            hosted.place: torch.zeros(
                1,
                hosted.module.num_chapters - hosted.module.num_shared,
                dtype=torch.int64,
                device=next(hosted.memory.parameters()).device,
            )
            for hosted in hosts
        }
    )
    with held_hooks() as hold:
        for hosted in hosts:
            for module in hosted.modules:
                hook = _chapter_counter(usage.counts[hosted.place][0], hosted.module.num_shared)
                hold(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield usage


def _chapter_counter(counts: torch.Tensor, num_shared: int) -> Any:
    """Return a pre-hook that counts opened chapters. It runs before the forward pass changes the state that routing reads."""

    def count(memory: Any, arguments: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        routing = _routing_of(memory, arguments, kwargs)
        if routing is not None:
            tokens = routing.pooled.counts.to(torch.int64).unsqueeze(-1).expand_as(routing.chosen)  # [B, U, k]
            counts.scatter_add_(0, (routing.chosen - num_shared).flatten().to(counts.device), tokens.flatten())

    return count


@torch.no_grad()
def _routing_of(memory: Any, arguments: tuple[torch.Tensor, ...], kwargs: Mapping[str, Any]) -> Routing | None:
    """Return the routing of a memory's forward pass; None for a pass without tokens, or repeated by activation checkpointing."""
    if is_in_backward() or not arguments[0].numel():
        return None
    return memory.route(arguments[0], **{name: kwargs.get(name) for name in ("tokens", "state", "prompt_mask")})
