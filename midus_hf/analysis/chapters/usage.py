"""Usage of chapters: how often a model's memories open each routed chapter."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from midus_hf.analysis.chapters.edits import memories_of_chapters
from midus_hf.analysis.chapters.records import routing_of
from midus_hf.analysis.slots.usage import Usage
from midus_hf.analysis.watched_models import held_hooks


@contextlib.contextmanager
def record_chapter_usage(model: nn.Module) -> Iterator[Usage]:
    """Count, while the context is open, how many tokens open each routed chapter of each memory.

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
                hook = _counter(usage.counts[hosted.place][0], hosted.module.num_shared)
                hold(module.register_forward_pre_hook(hook, with_kwargs=True))
        yield usage


def _counter(counts: torch.Tensor, num_shared: int) -> Any:
    """Return a pre-hook that counts opened chapters. It runs before the forward pass changes the state that routing reads."""

    def count(memory: Any, arguments: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
        routing = routing_of(memory, arguments, kwargs)
        if routing is not None:
            tokens = routing.pooled.counts.to(torch.int64).unsqueeze(-1).expand_as(routing.chosen)  # [B, U, k]
            counts.scatter_add_(0, (routing.chosen - num_shared).flatten().to(counts.device), tokens.flatten())

    return count
