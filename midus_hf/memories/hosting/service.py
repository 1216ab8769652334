"""The base class of services: what a model does for its memories beside calling them in its layers."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from midus_hf.memories.entries import Memories
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.memories.hosting.parts import Keywords
from midus_hf.memories.module import MemoryModule


class Service:
    """Service of a model to its memories: what it makes in every pass for them, and what it does around passes.

    A layer of a memory names the classes of the services that it needs, and the stack of layers makes one object of each. A service
    keeps nothing of a pass.

    Args:
        model: The stack of layers, whose memories are built.
        hosted: Each memory that needs the service, by its name and the index of its layer; the name of an inserted memory is empty.
    """

    #: Name of the service in a stack's `services`.
    key: ClassVar[str]
    #: Whether to skip a memory when this service produced nothing for it; the value of a pass then has the memory's name as a key.
    is_required: ClassVar[bool] = False
    #: Whether a pass may get a cache from the service, which then comes after services that ask whether there is one.
    may_add_cache: ClassVar[bool] = False

    def __init__(self, model: "HostStack", memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        pass

    def of_pass(self, model: "HostStack", arguments: Keywords, own: Keywords) -> Any:
        """Return the value of a pass of the stack, which `given` takes. Default: None.

        The service may change the `arguments` of the family's forward; `own` are those that the family's forward does not get.
        """
        return None

    @staticmethod
    def given(value: Any, name: str, layer: int) -> Keywords:
        """Return a memory's keyword arguments in a layer, from the value of the pass; None for one without inputs. Default: none."""
        return {}

    def run(self, model: Any, forward: Callable[[Keywords], Any], arguments: Keywords) -> Any:
        """Run the family's forward, which takes its arguments as one mapping, of a model with a head. Default: as it is."""
        return forward(arguments)

    def prepare_inputs(self, inputs: Keywords, attention_mask: object) -> None:
        """Add to the inputs of the next pass of a generation, from its attention mask. Default: nothing."""

    def before_generate(self, arguments: Keywords) -> None:
        """Check and change the keyword arguments of `generate`. Default: nothing."""

    def check_assistant(self) -> None:
        """Refuse assisted decoding, before any token is drafted. Default: allowed."""

    def check_continuous_batching(self, arguments: Keywords) -> None:
        """Refuse continuous batching, which lays the tokens of several requests in one row, with its arguments. Default: allowed."""

    def after_loading(self, name: str | os.PathLike | None, arguments: Keywords) -> None:
        """Load what lies beside a checkpoint, with the arguments of `from_pretrained`. Default: nothing."""

    def before_saving(self, folder: str | os.PathLike) -> None:
        """Write what belongs beside the weights in a folder, and is uploaded with them. Default: nothing."""

    def after_saving(self, folder: str | os.PathLike) -> None:
        """Write what belongs beside the weights in a folder. Default: nothing."""

    def check_upload(self) -> None:
        """Refuse an upload by Transformers. Default: allowed."""


class HostStack(nn.Module):
    """A model's stack, as its services see it. If memories are attached, layers of the base are host layers."""

    config: PreTrainedConfig
    dtype: torch.dtype
    layers: Sequence[HostLayer]
    memory_tables: Any
    #: Names of the arguments of the forward that memories take.
    memory_input_names: set[str]
    #: Services that the memories need, by key.
    services: dict[str, Service]
    #: What `banks` of a model returns.
    own_banks: Any = None
