"""The base class of a memory's options: declared tensors, sites, supported models. Needs no torch."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from midus_hf.config.declared_tensors import DeclaredTensor, ModelSizes, Role
from midus_hf.config.errors import RequestError

# `inserted`: the memory has its own decoder layer; all others attach it to one of the base (`midus_hf.memories.hosting.sites`).
SiteName = Literal[
    "inserted", "beside-ffn", "inside-ffn", "inside-attention", "behind-attention", "behind-layer", "skip"
]
SITES: tuple[SiteName, ...] = get_args(SiteName)

# `one-row`: a single row, or one per head, so that no choice is left. `random-slots`: rows are drawn at random for each token.
DeclaredControl = Literal["one-row", "random-slots"]

Addressing = Literal["content", "random"]
ADDRESSING_HELP = (
    "how slots are retrieved. content: by what a token holds; random: by a query that is drawn anew for every token and pass, as "
    "long as the token's own query, so that it says nothing of the text: a control"
)
RANDOM_SLOTS: Mapping[DeclaredControl, Mapping[str, Any]] = {"random-slots": {"addressing": "random"}}


def package_only(member: Any) -> Any:
    """Mark a member of a class that the code of checkpoints leaves out, such as costs and files."""
    return member


def definition_in(module: str, name: str) -> Any:
    """Return a definition of a module that is imported only now, since it imports the options."""
    return getattr(importlib.import_module(module), name)


@dataclass(kw_only=True)
class MemoryOptions:
    """Options of a type of memory, with the tensors that follow from the options.

    A subclass is registered under the `type` that entries of a config's `memory` list name. Its fields are made with
    `midus_hf.config.options.option` and have defaults. `check`, `check_fit`, `check_layers` and `check_beside` raise a
    `RequestError` for invalid values, models, layers and other memories; by default they refuse nothing. `index` counts from 0 among
    the `count` layers that have the memory.
    """

    type: ClassVar[str]
    #: Name of an attached memory in the names of its tensors, unless its entry gives another.
    default_name: ClassVar[str]
    #: Class of the memory's layer, once its module has been imported; `register_layer` sets it.
    layer: ClassVar[Any] = None
    #: Sites that the memory can take, the default first.
    sites: ClassVar[tuple[SiteName, ...]] = ()
    #: True if the memory replaces the layer's attention by an attention that also reads what earlier layers wrote.
    attends: ClassVar[bool] = False
    #: Controls that options define, each with the options that it sets (`midus_hf.memories.controls` adds others).
    controls: ClassVar[Mapping[DeclaredControl, Mapping[str, Any]]] = {}
    #: Roles of the tensors from which retrieved values are computed. These tensors train in the control `frozen-addresses`.
    value_roles: ClassVar[tuple[Role, ...]] = ("value", "transform")
    #: True if a new model's projections into the residual stream start `1 / sqrt(2 L)` times as large (`ScaledInitialisation`).
    scales_initialisation: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Refuse options that are out of range."""

    def check_fit(self, sizes: ModelSizes) -> None:
        """Refuse a model that the memory does not support."""

    def check_layers(self, layers: tuple[int, ...]) -> None:
        """Refuse a choice of layers, given by their ascending indices, that does not work."""

    def check_beside(self, name: str, others: Mapping[str, "MemoryOptions"]) -> None:
        """Refuse other memories of the same model, by name, that cannot be combined with this one."""

    @property
    @package_only
    def reads_ahead(self) -> bool:
        """True if a token depends on later tokens. The model is then not causal. Default: False."""
        return False

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        """Return a layer's tensors by name, in stored order; `NAME.weight` is of a linear layer, others have no dot."""
        raise NotImplementedError

    def tensors_at(self, sizes: ModelSizes, index: int, count: int) -> dict[str, DeclaredTensor]:
        """Return the subset of `tensors` that one layer has. Default: all tensors."""
        return self.tensors(sizes)

    def layer_outputs(self, index: int, count: int) -> tuple[str, ...]:
        """Return the names of the tensors that one layer passes on to later layers. Default: none."""
        return ()

    def layer_inputs(self, index: int) -> tuple[tuple[int, str], ...]:
        """Return the tensors that a layer takes, as pairs (index of the earlier layer, name). Default: none."""
        return ()

    def tables(self, sizes: ModelSizes, layers: tuple[int, ...]) -> tuple["SharedTables", ...]:
        """Return the tables that the memory's layers, by ascending indices, share. Default: none.

        The model holds each once. Only the order of layers may decide which share a table.
        """
        return ()

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        """Return the input and output width of projections a layer needs, by role. Default: none."""
        return {}

    @package_only
    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        """Count the FLOPs of one layer and forward pass by purpose, residual adds included; see `midus_hf.memories.flops`.

        There are `batch` sequences of `tokens` tokens.

        Raises:
            RequestError: If the FLOPs of the memory are unknown.
        """
        raise RequestError(
            f"the FLOPs of memory type {self.type!r} are unknown; expected a method flops of {type(self).__name__}. Leave the memory "
            "out of the config to count the rest."
        )

    @package_only
    def values_read(self, sizes: ModelSizes) -> int | None:
        """Return the number of value elements that a token reads in one layer. Default: None, all."""
        return None

    @classmethod
    @package_only
    def memory_files(cls) -> Any:
        """Return the subclass of `MemoryFiles` for files next to the weights. Default: None, there are none."""
        return None

    @classmethod
    @package_only
    def paged_layer(cls) -> Any:
        """Return the class that serves the memory in vLLM. Default: None, that of other engines."""
        return None


def head_projections(sizes: ModelSizes) -> dict[str, tuple[int, int]]:
    """Return the widths of the projections around heads, for a memory that adds keys and values."""
    key_width = sizes.num_key_value_heads * sizes.head_dim
    return {
        "key": (sizes.hidden_size, key_width),
        "value": (sizes.hidden_size, key_width),
        "output_projection": (sizes.num_heads * sizes.head_dim, sizes.hidden_size),
    }


@dataclass(frozen=True)
class SharedTables:
    """Tables that layers, by index, read and the model holds once, named as in `MemoryOptions.tensors`."""

    layers: tuple[int, ...]
    tensors: dict[str, DeclaredTensor]


@dataclass(kw_only=True)
class InsertedOptions(MemoryOptions):
    """Options of a memory with its own decoder layers, in which it reads the output of the attention."""

    #: Whether the attention before it keeps its output projection and the norm that follows it. A subclass may make it an option.
    output_projection = False
    #: Whether the block's input is added to the attention output that the memory reads. A subclass may make it an option.
    inner_residual = False


# Attributes of torch's containers of modules. A module in a container cannot have one of these names.
_WORDS_OF_MODULES = frozenset(
    "apply bfloat16 buffers children clear compile cpu cuda double eval float forward half ipu items keys modules mtia "
    "parameters pop to train training type update values xpu".split()
)


def is_name(name: str) -> bool:
    """Return whether words joined by hyphens name a memory, and no attribute of a torch container."""
    return all(word.isalnum() for word in name.split("-")) and name not in _WORDS_OF_MODULES
