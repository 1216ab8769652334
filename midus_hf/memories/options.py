"""The base class of a memory's options, which declares tensors, sites and supported models. Readable without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from midus_hf.config.declared_tensors import DeclaredTensor, ModelSizes, Role

# Position of a memory in a model. `inserted`: the memory has its own decoder layer, and reads the output of the attention in that
# layer. At every other site it is attached to a layer of the base (`midus_hf.memories.hosting.sites`).
SiteName = Literal[
    "inserted", "beside-ffn", "inside-ffn", "inside-attention", "behind-attention", "behind-layer", "skip"
]
SITES: tuple[SiteName, ...] = get_args(SiteName)

# Name of a control that options define. `one-row`: the memory has a single row, or one per head if each head has
# rows, so no choice is left. `random-slots`: the rows that a token reads are drawn at random, independently of the
# token.
DeclaredControl = Literal["one-row", "random-slots"]


@dataclass(kw_only=True)
class MemoryOptions:
    """Options of a type of memory, with the tensors that follow from the options.

    A subclass is registered under the `type` that entries of a config's `memory` list name. Its fields are made with
    `midus_hf.config.options.option` and have defaults. The methods `check`, `check_fit`, `check_layers` and `check_beside` raise a
    `RequestError` for invalid values, unsupported models, layers and other memories; by default they refuse nothing. Costs are
    functions in a module `costs` in the same folder, under decorators of `midus_hf.memories.flops`. Methods that take `index` and
    `count` describe one layer: `index` counts from 0 among the `count` layers that have the memory.
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
    #: True if a model that is built from a config initialises the projections that write to the residual stream with
    #: `1 / sqrt(2 L)` times the standard deviation of all others (service `ScaledInitialisation`).
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
        """Refuse other memories of the same model, by name, that cannot be combined with this one, called `name`."""

    @property
    def reads_ahead(self) -> bool:
        """True if a token depends on later tokens. The model is then not causal. Default: False."""
        return False

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        """Return the tensors of the memory in one layer, by their name within the memory, in the order of storage.

        The weight of a linear layer is declared as `NAME.weight`; every other name has no dot.
        """
        raise NotImplementedError

    def tensors_at(self, sizes: ModelSizes, index: int, count: int) -> dict[str, DeclaredTensor]:
        """Return the subset of `tensors` that one layer has. Default: all tensors."""
        return self.tensors(sizes)

    def layer_outputs(self, index: int, count: int) -> tuple[str, ...]:
        """Return the names of the tensors that one layer passes on to later layers. Default: none."""
        return ()

    def layer_inputs(self, index: int) -> tuple[tuple[int, str], ...]:
        """Return the tensors that one layer takes from earlier layers, as pairs (index of the earlier layer, name). Default: none."""
        return ()

    def tables(self, sizes: ModelSizes, layers: tuple[int, ...]) -> tuple["SharedTables", ...]:
        """Return the tables that the memory's layers, given by ascending indices, share; the model holds each once. Default: none.

        Only the order of layers may decide which share a table.
        """
        return ()

    def layer_projections(self, sizes: ModelSizes) -> dict[str, tuple[int, int]]:
        """Return the input and output width of the projections that a layer must have for the memory, by role. Default: none."""
        return {}


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
    """Tables that several layers, given by their indices, read and the model holds once, named as in `MemoryOptions.tensors`."""

    layers: tuple[int, ...]
    tensors: dict[str, DeclaredTensor]


@dataclass(kw_only=True)
class InsertedOptions(MemoryOptions):
    """Options of a memory with its own decoder layers, in which the memory reads the output of the attention."""

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
    """Return whether a memory can have this name: words joined by hyphens, and no attribute of a torch container of modules."""
    return all(word.isalnum() for word in name.split("-")) and name not in _WORDS_OF_MODULES
