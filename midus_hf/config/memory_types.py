"""What a type of memory is: its options, its tensors, the sites it can take; and the table of types."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, TypeVar, get_args

from midus_hf.config.declared_tensors import DeclaredTensor, Role
from midus_hf.config.fetched_blocks import FetchedBlocks
from midus_hf.config.installed import needed_for, not_carried
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.plugins import is_same_class, load_offered

Site = Literal["inserted", "beside-ffn", "inside-ffn", "inside-attention", "behind-attention", "behind-layer", "skip"]
"""Where a memory sits.

`inserted`: it has a decoder layer of its own, and reads what the attention there gives. Every other site is in a layer of the
base, to which the memory is attached. `beside-ffn`: it reads what the feed-forward network (FFN) reads, and adds to what that
gives, in front of the norm behind it where a family has one. `inside-ffn`: it changes what the projections of the FFN give.
`inside-attention`: it changes what the projections of the attention give, or what its heads read. `behind-attention` and
`behind-layer`: it reads the residual stream there and adds to it. `skip`: it reads what the FFN of one layer reads, and adds to the
residual stream behind another.
"""

SITES: tuple[Site, ...] = get_args(Site)
ROLES: tuple[Role, ...] = get_args(Role)

DeclaredControl = Literal["one-row", "random-slots"]
"""A memory with its addressing taken away by its options. `one-row`: it has a single row, per head where heads have rows of their
own, so that there is nothing to choose. `random-slots`: what it reads is drawn for each token, whatever the token holds."""


@dataclass(kw_only=True)
class MemoryOptions:
    """What one may choose of a type of memory, and what follows from that.

    A subclass is registered under the `type` that entries of a config's `memory` list call it by. Its fields are
    made with `midus_hf.config.options.option` and have defaults. `__post_init__` refuses values out of range, `check` a model that
    the memory does not fit.
    """

    type: ClassVar[str]
    sites: ClassVar[tuple[Site, ...]] = ()
    """The sites that the memory can take, its usual one first."""
    attends: ClassVar[bool] = False
    """Whether a memory inside attention attends in its place, to what earlier layers wrote as well."""
    controls: ClassVar[Mapping[DeclaredControl, Mapping[str, Any]]] = {}
    """The controls that options make of it, each by the options that take the place of others.
    `midus_hf.config.controls.controls_of` adds those that follow from roles."""
    value_roles: ClassVar[tuple[Role, ...]] = ("value", "transform")
    """Roles of the tensors that make what is retrieved: they train where addresses are frozen."""

    narrows_start: ClassVar[bool] = False
    """Whether a model that has the memory, and is built from a config, draws the projections by which its layers write to the
    residual stream with `1 / sqrt(2 L)` of the deviation of all others, L its layers: the output projection of attention and the
    down projection of feed-forward networks. What a checkpoint holds stays as it is."""

    @property
    def reads_ahead(self) -> bool:
        """Whether what a token gets depends on later tokens: then the model is not causal. Default: false."""
        return False

    @property
    def reads_prompts(self) -> bool:
        """Whether passes have to say which tokens are a prompt: plain text is all prompt, and read ahead. Default: false."""
        return False

    @not_carried
    def check(self, sizes: ModelSizes) -> None:
        """Refuse a model that the memory does not fit.

        Raises:
            ValueError: With the size, what was expected and what helps.
        """

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        """The tensors of the memory in one layer, by their name within it, in the order that they are stored.

        `weight` of a linear layer is declared as `name.weight`; every other name has no dot.
        """
        raise TypeError(f"{type(self).__name__} does not say which tensors it has.")

    def tensors_at(self, sizes: ModelSizes, index: int, count: int) -> dict[str, DeclaredTensor]:
        """Those of `tensors` that one of its layers has. Default: all.

        Args:
            sizes: Of the model.
            index: Of the layer, among those that have the memory.
            count: How many layers have it.
        """
        return self.tensors(sizes)

    @not_carried
    def check_layers(self, layers: tuple[int, ...]) -> None:
        """Refuse layers that the memory cannot be in together.

        Args:
            layers: Those that have the memory, ascending.

        Raises:
            ValueError: With the layers, what was expected and what helps.
        """

    @needed_for("carries")
    def gives(self, index: int, count: int) -> tuple[str, ...]:
        """What one of its layers gives for later ones, tensors by name. Default: nothing.

        Args:
            index: Of the layer, among those that have the memory.
            count: How many layers have it.
        """
        return ()

    @not_carried
    def given_shape(self, name: str, sizes: ModelSizes, index: int, batch: int, tokens: int) -> tuple[int, ...]:
        """The shape of what one of its layers gives for later ones.

        Args:
            name: One of those that it `gives`.
            sizes: Of the model.
            index: Of the layer, among those that have the memory.
            batch: Rows of a pass.
            tokens: Tokens of a row.
        """
        raise AssertionError(f"memory type {self.type!r} gives no {name!r}")

    @not_carried
    def starts_at_zero(self, name: str) -> bool:
        """Whether what layers give for later ones is zero until the memory is trained, whatever they read. Default: no.

        Args:
            name: One of those that they give.
        """
        return False

    @needed_for("carries")
    def takes(self, index: int) -> tuple[tuple[int, str], ...]:
        """What one of its layers takes of what earlier ones gave: the index of the giver, and the name. Default: nothing.

        Args:
            index: Of the layer, among those that have the memory.
        """
        return ()

    @needed_for("tables")
    def tables(self, sizes: ModelSizes, layers: tuple[int, ...]) -> tuple["SharedTables", ...]:
        """The tables that layers share, which live once, at the model. Default: none.

        Args:
            sizes: Of the model.
            layers: Those that have the memory, ascending. What is shared by which of them follows from their order alone.
        """
        return ()

    @needed_for("banks")
    def fetched(self, sizes: ModelSizes) -> FetchedBlocks | None:
        """What each text fetches for a layer from a bank beside the checkpoint. Default: nothing."""
        return None

    @not_carried
    def values_read(self, sizes: ModelSizes) -> int | None:
        """How many numbers of its values one token reads in one layer. Default: None, all of them.

        Args:
            sizes: Of the model.
        """
        return None

    @not_carried
    def flops(self, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int) -> dict[str, int]:
        """Floating-point operations of the memory in one layer and forward pass, its part of the residual stream included.

        Args:
            sizes: Of the model.
            batch: B, sequences.
            tokens: T, tokens of each.
            index: Of the layer, among those that have the memory.
            count: How many layers have it.

        Returns:
            Operations by the name of what they are for. `midus_hf.config.flops.rules` has their prices.

        Raises:
            ValueError: If the type of memory does not say.
        """
        raise ValueError(
            f"memory of type {self.type!r} does not say how many operations it takes; expected a method flops of "
            f"{type(self).__name__}. Leave the memory out of the config to count the rest."
        )


@dataclass(frozen=True)
class SharedTables:
    """Tables that live at the model.

    Args:
        layers: Those that read them.
        tensors: By name, as `MemoryOptions.tensors` has them.
    """

    layers: tuple[int, ...]
    tensors: dict[str, DeclaredTensor]


@dataclass(kw_only=True)
class InsertedOptions(MemoryOptions):
    """Options of a memory that has a decoder layer of its own, and reads what the attention in front gives."""

    @property
    def keeps_output_projection(self) -> bool:
        """Whether the attention in front keeps its output projection, and the norm behind it."""
        return False

    @property
    def adds_block_input(self) -> bool:
        """Whether the block's input is added to the attention output that the memory reads."""
        return False

    def read_width(self, sizes: ModelSizes) -> int:
        """Width of what the memory reads: D behind an output projection, H * d without one."""
        return sizes.hidden_size if self.keeps_output_projection else sizes.num_heads * sizes.head_dim


MEMORY_TYPES: dict[str, type[MemoryOptions]] = {}
"""The types that are registered; what other packages offer is among them once it was asked for."""

Options = TypeVar("Options", bound=MemoryOptions)


def known_type(name: object) -> bool:
    """Whether there is a type of memory of this name, here or offered by another package."""
    if name not in MEMORY_TYPES:
        load_offered("midus_hf.config.memories")
    return name in MEMORY_TYPES


def register_memory_type(name: str) -> Callable[[type[Options]], type[Options]]:
    """Register the options of a type of memory under the `type` that configs call it by.

    Args:
        name: Lower case words joined by hyphens.

    Raises:
        ValueError: If the name is of another form, or taken by another class, or if what the class declares cannot be built:
            a site that there is not, an option without a default, a name or role of a tensor.
    """
    if not is_name(name) or name != name.lower():
        raise ValueError(
            f"memory type is {name!r}; expected lower case words joined by hyphens, and no word of a torch module."
        )

    def decorate(cls: type[Options]) -> type[Options]:
        taken = MEMORY_TYPES.get(name)
        if taken is not None and not is_same_class(taken, cls):
            raise ValueError(f"memory type {name!r} is already registered by {taken.__name__}; choose another name.")
        _check_declaration(name, cls)
        cls.type = name
        MEMORY_TYPES[name] = cls
        return cls

    return decorate


_WORDS_OF_MODULES = frozenset(
    "apply bfloat16 buffers children clear compile cpu cuda double eval float forward half ipu items keys modules mtia "
    "parameters pop to train training type update values xpu".split()
)
"""What a torch container of modules has for attributes: no module in it can have one of these names."""


def is_name(name: str) -> bool:
    """Whether a memory can be called so: words joined by hyphens, and no attribute of a torch container of modules."""
    return name.replace("-", "").isalnum() and name not in _WORDS_OF_MODULES


_WORDS_OF_ENTRIES = frozenset({"type", "name", "site", "layers", "into", "span"})

_SAMPLE = ModelSizes(hidden_size=64, num_heads=4, intermediate_size=128, num_layers=4)


def sample_tensors(options_class: type[MemoryOptions]) -> list[tuple[str, DeclaredTensor]]:
    """What a memory with default options declares for layers of some model and for its tables: to look at names and roles."""
    options = options_class()
    tables = options.tables(_SAMPLE, tuple(range(_SAMPLE.num_layers)))
    return [*options.tensors(_SAMPLE).items(), *(item for shared in tables for item in shared.tensors.items())]


def _check_declaration(name: str, cls: type[MemoryOptions]) -> None:
    strange = [site for site in cls.sites if site not in SITES]
    if strange or not cls.sites:
        raise ValueError(f"memory type {name!r} has sites = {cls.sites}; expected one or more of {', '.join(SITES)}.")
    if "inserted" in cls.sites and not issubclass(cls, InsertedOptions):
        raise ValueError(f"memory type {name!r} can be inserted; expected its options to extend InsertedOptions.")
    try:
        options = cls()
    except TypeError as error:
        raise ValueError(
            f"memory type {name!r} cannot be built without options ({error}); give each a default."
        ) from None
    taken = sorted(_WORDS_OF_ENTRIES & {field.name for field in fields(options)})
    if taken:
        raise ValueError(
            f"memory type {name!r} has the option {taken[0]!r}, which says what or where a memory is; choose another name."
        )
    for control, changes in cls.controls.items():
        _check_control(name, cls, control, changes)
    for tensor_name, tensor in sample_tensors(cls):
        parent, _, leaf = tensor_name.rpartition(".")
        if not leaf.isidentifier() or (parent and (leaf != "weight" or not parent.isidentifier())):
            raise ValueError(
                f"memory type {name!r} has a tensor {tensor_name!r}; expected a name without dots, or NAME.weight."
            )
        if hasattr(dict, parent or leaf):
            raise ValueError(
                f"memory type {name!r} has a tensor {tensor_name!r}, a name that dictionaries have for a method, which "
                "PEFT cannot wrap; choose another."
            )
        if tensor.role == "buffer" and parent:
            raise ValueError(
                f"memory type {name!r} gives {tensor_name} the role 'buffer'; expected a parameter: linear layers have no "
                "buffers."
            )
        if tensor.dtype and tensor.role != "buffer":
            raise ValueError(
                f"memory type {name!r} gives {tensor_name} the role {tensor.role!r} and the dtype {tensor.dtype}; expected the role "
                "'buffer', since integers do not train."
            )
        if tensor.role not in ROLES:
            raise ValueError(
                f"memory type {name!r} gives {tensor_name} the role {tensor.role!r}; expected one of {', '.join(ROLES)}."
            )


def _check_control(name: str, cls: type[MemoryOptions], control: str, changes: Mapping[str, Any]) -> None:
    """Refuse a control that there is not, or one whose options the type does not take."""
    if control not in get_args(DeclaredControl):
        raise ValueError(
            f"memory type {name!r} declares the control {control!r}; expected one of {', '.join(get_args(DeclaredControl))}."
        )
    unknown = sorted(changes.keys() - {field.name for field in fields(cls)})
    if unknown or not changes:
        what = f"the option {unknown[0]!r}, which it does not have" if unknown else "no option"
        raise ValueError(f"the control {control!r} of memory type {name!r} sets {what}; expected some of its own.")
    try:
        cls(**changes)
    except ValueError as error:
        raise ValueError(f"the control {control!r} of memory type {name!r} cannot be built: {error}") from None
