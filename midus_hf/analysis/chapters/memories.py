"""The memories of a model that read chapters."""

from torch import nn

from midus_hf.analysis.watched_models import HostedMemory, bare_model, hosted_memories, named, whole_and_named
from midus_hf.memory.protocols import ReadsChapters


def memories_of_chapters(model: nn.Module, name: str | None = None, *, whole: bool = True) -> list[HostedMemory]:
    """Return the memories of a model that read chapters, in the order of layers.

    Args:
        model: A causal language model whose decoder has `layers`. It may be compiled, or wrapped by accelerate or PEFT.
        name: Name of the memory. Default: memories of all names.
        whole: Whether to refuse memories that are offloaded. Default: True.

    Raises:
        ValueError: If no memory reads chapters or has the name, or if a memory is offloaded and `whole` is true.
    """
    hosts = hosted_memories(model, ReadsChapters)
    if not hosts:
        model_type = bare_model(model).config.model_type
        raise ValueError(
            f"this {model_type} model has no memory of chapters; expected one upscaled with such a memory."
        )
    return whole_and_named(hosts, name) if whole else named(hosts, name)


def one_memory(model: nn.Module, name: str | None = None, *, whole: bool = True) -> list[HostedMemory]:
    """Return one memory of chapters, once for each layer that it is in. Arguments are as in `memories_of_chapters`.

    Args:
        name: Name of the memory. Default: the only one.

    Raises:
        ValueError: For the reasons of `memories_of_chapters`; if there are memories of several names and `name` is None.
    """
    hosts = memories_of_chapters(model, name, whole=whole)
    names = dict.fromkeys(hosted.name for hosted in hosts)
    if len(names) > 1:
        raise ValueError(f"the model has memories of chapters {', '.join(names)}; expected one of them. Pass memory.")
    return hosts
