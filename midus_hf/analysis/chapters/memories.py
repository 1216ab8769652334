"""The memories of chapters of a model."""

from torch import nn

from midus_hf.analysis.watched_models import HostedMemory, bare_model, hosted_memories, named, whole_and_named
from midus_hf.memory.protocols import ReadsChapters


def memories_of_chapters(model: nn.Module, name: str | None = None, *, whole: bool = True) -> list[HostedMemory]:
    """Return the memories of a model that read chapters, by layer.

    Args:
        model: A causal language model whose decoder has `layers`, compiled or not, or what accelerate or PEFT has wrapped around
            one.
        name: Of one of several memories of chapters. Default: all.
        whole: Whether to refuse memories that are offloaded. Default: true.

    Raises:
        ValueError: If there is none, or none of that name, or one is offloaded.
    """
    hosts = hosted_memories(model, ReadsChapters)
    if not hosts:
        model_type = bare_model(model).config.model_type
        raise ValueError(
            f"this {model_type} model has no memory of chapters; expected one upscaled with such a memory."
        )
    return whole_and_named(hosts, name) if whole else named(hosts, name)


def one_memory(model: nn.Module, name: str | None = None, *, whole: bool = True) -> list[HostedMemory]:
    """Return the layers of one memory of chapters.

    Args:
        model: As for `memories_of_chapters`.
        name: Of the memory. Default: the only one.
        whole: As for `memories_of_chapters`.

    Raises:
        ValueError: As `memories_of_chapters`, and if there are several and none is named.
    """
    hosts = memories_of_chapters(model, name, whole=whole)
    names = dict.fromkeys(hosted.name for hosted in hosts)
    if len(names) > 1:
        raise ValueError(f"the model has memories of chapters {', '.join(names)}; expected one of them. Pass memory.")
    return hosts
