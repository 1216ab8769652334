"""How often each routed chapter of a model's memories is opened: usage, as of slots."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from midus_hf.analysis.chapters.memories import memories_of_chapters
from midus_hf.analysis.chapters.records import routing_of
from midus_hf.analysis.slots.usage import Usage
from midus_hf.analysis.watched_models import held_hooks


@contextlib.contextmanager
def record_chapter_usage(model: nn.Module) -> Iterator[Usage]:
    """Count, while the context is open, how many tokens open each routed chapter of each memory.

    Padding does not count, and shared chapters, which every token reads, are left out. Routing is done twice. What `torch.compile`
    has compiled, of this model or another, runs uncompiled while the context is open.

    Args:
        model: As for `memories_of_chapters`. Its memories have a hook more while the context is open.

    Raises:
        ValueError: As `memories_of_chapters`.
    """
    found = memories_of_chapters(model)
    usage = Usage(
        {
            hosted.place: torch.zeros(
                1,
                hosted.module.num_chapters - hosted.module.num_shared,
                dtype=torch.int64,
                device=next(hosted.memory.parameters()).device,
            )
            for hosted in found
        }
    )
    with held_hooks() as hold:
        for hosted in found:
            for module in hosted.modules:
                hook = _counter(usage.counts[hosted.place][0], hosted.module.num_shared)
                hold(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield usage


def _counter(counts: torch.Tensor, num_shared: int) -> Any:
    """A hook in front of the forward pass, which changes the state that routing goes by."""

    def count(memory: Any, arguments: tuple[torch.Tensor, ...], given: dict[str, Any]) -> None:
        routing = routing_of(memory, arguments, given)
        if routing is not None:
            tokens = routing.pooled.counts.to(torch.int64).unsqueeze(-1).expand_as(routing.chosen)  # [B, U, k]
            counts.scatter_add_(0, (routing.chosen - num_shared).flatten().to(counts.device), tokens.flatten())

    return count
