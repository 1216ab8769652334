"""The registry of memories: options by their type, layers by their options.

A memory is a Python package: `options.py`, readable without torch, registers the options of a type; `layer.py` has the layer, which
is imported when a model is built; `costs.py` has its FLOPs, if they are known. The entry point
`midus_hf.memories` of another package names such a folder, whose import registers the options.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import fields
from typing import Any, TypeVar, get_args

from midus_hf.config.declared_tensors import DeclaredTensor, Role
from midus_hf.config.errors import RequestError
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.plugins import is_same_class, load_plugins
from midus_hf.memories.options import SITES, MemoryOptions, is_name

Options = TypeVar("Options", bound=MemoryOptions)
Layer = TypeVar("Layer", bound=type)

#: Options classes of the registered types, by type. Types of other packages are added when `memory_type` looks for one.
MEMORY_TYPES: dict[str, type[MemoryOptions]] = {}

# Types in checkpoints from before types had the names of their methods, which are read until 1.0.
_EARLIER_TYPES = {
    "chapters": "moc",
    "depth-attention": "moda",
    "headwise": "midus-hml",
    "linear": "midus-linear",
    "ngram": "engram",
    "product-key": "midus-pkm",
    "ultramem": "ultramem-v2",
}

_PAGED: dict[type[MemoryOptions], Any] = {}

_WORDS_OF_ENTRIES = frozenset({"type", "name", "site", "layers", "into", "span"})

_ROLES: tuple[Role, ...] = get_args(Role)

_SAMPLE = ModelSizes(hidden_size=64, num_heads=4, intermediate_size=128, num_layers=4)


def register_memory(name: str, default_name: str | None = None) -> Callable[[type[Options]], type[Options]]:
    """Return a decorator that registers the options of a type of memory under the `type` that configs name.

    Args:
        name: Lower case words joined by hyphens.
        default_name: Name of an attached memory in the names of its tensors. Default: `name`.

    Raises:
        RequestError: If the name has another form or belongs to another class, or if `check_declaration` refuses
            the class.
    """
    if not is_name(name) or name != name.lower():
        raise RequestError(
            f"memory type is {name!r}; expected lower case words joined by hyphens, and no word of a torch module."
        )

    def decorate(cls: type[Options]) -> type[Options]:
        taken = MEMORY_TYPES.get(name)
        if taken is not None and not is_same_class(taken, cls):
            raise RequestError(f"memory type {name!r} is already registered by {taken.__name__}; choose another name.")
        if cls.__module__.partition(".")[0] != __name__.partition(".")[0]:  # a test checks the types of this package
            check_declaration(name, cls)
        cls.type, cls.default_name = name, default_name or name
        MEMORY_TYPES[name] = cls
        return cls

    return decorate


def register_layer(options_class: type[MemoryOptions]) -> Callable[[Layer], Layer]:
    """Return a decorator that makes a class the layer of a memory, which `layer_class` finds by the memory's options.

    Raises:
        RequestError: If the options have another layer.
    """

    def decorate(cls: Layer) -> Layer:
        taken = vars(options_class).get("layer")
        if taken is not None and not is_same_class(taken, cls):
            raise RequestError(
                f"{options_class.__name__} already has the layer {taken.__name__}; choose other options."
            )
        options_class.layer = cls
        return cls

    return decorate


layer_of = register_layer  # the name until 1.0


def register_paged_layer(options_class: type[MemoryOptions]) -> Callable[[Layer], Layer]:
    """Return a decorator that makes a subclass of a memory's layer the one that serves the memory in vLLM.

    vLLM lays tokens of several requests in one row and keeps keys and values in pages. Such a subclass is in the module `layer` or
    `paged` next to the options, and does not travel with checkpoints.
    """

    def decorate(cls: Layer) -> Layer:
        _PAGED[options_class] = cls
        return cls

    return decorate


def layer_class(options: MemoryOptions, attention: str | None = None) -> Any:
    """Return the class of a memory's layer; import the module `layer` in the folder of its options if needed.

    Args:
        options: The memory's options.
        attention: The implementation of attention of the model; with "vllm" the class may be the one of the module `paged`. Default:
            another.

    Raises:
        RequestError: If no class is the layer of the memory.
    """
    options_class = type(options)
    if attention == "vllm":
        import_beside(options_class, "layer")
        import_beside(options_class, "paged")
        if options_class in _PAGED:
            return _PAGED[options_class]
    if vars(options_class).get("layer") is None:  # a subclass has a separate layer
        import_beside(options_class, "layer")
    if vars(options_class).get("layer") is None:
        raise RequestError(
            f"memory type {options.type!r} has no layer; expected one in the module 'layer' beside {options_class.__name__}, "
            f"with the decorator register_layer({options_class.__name__})."
        )
    return options_class.layer


def import_beside(options_class: type[MemoryOptions], name: str) -> None:
    """Import a module in the folder of the module of options, if there is one."""
    package = options_class.__module__.rpartition(".")[0]
    if package:
        _import_from(package, name)


@functools.cache  # each generation asks for decode caches
def _import_from(package: str, name: str) -> None:
    if importlib.util.find_spec(f"{package}.{name}") is not None:
        importlib.import_module(f"{package}.{name}")


def memory_type(name: Any) -> type[MemoryOptions]:
    """Return the options class of a type of memory, from this package or offered by another package.

    Raises:
        RequestError: If no package has the type.
    """
    if isinstance(name, str):
        name = _EARLIER_TYPES.get(name, name)
    if isinstance(name, str) and name not in MEMORY_TYPES:
        load_plugins("midus_hf.memories")
    if not isinstance(name, str) or name not in MEMORY_TYPES:
        raise RequestError(
            f"memory type is {name!r}; expected one of: {', '.join(sorted(MEMORY_TYPES))}. Do not rename a type, "
            "since tensors mean something else under another type. A type of another package is known only where it is installed."
        )
    return MEMORY_TYPES[name]


def sample_tensors(options_class: type[MemoryOptions]) -> list[tuple[str, DeclaredTensor]]:
    """Return the tensors that default options declare for a layer and for tables of an example model."""
    options = options_class()
    tables = options.tables(_SAMPLE, tuple(range(_SAMPLE.num_layers)))
    return [*options.tensors(_SAMPLE).items(), *(item for shared in tables for item in shared.tensors.items())]


def check_declaration(name: str, cls: type[MemoryOptions]) -> None:
    """Refuse declarations that would mean something else without a word.

    Raises:
        RequestError: If the class declares no site or an unknown one, an option that says what or where a memory is, an unknown role,
            a buffer in a linear layer, or integers that train.
    """
    if not cls.sites or any(site not in SITES for site in cls.sites):
        raise RequestError(
            f"memory type {name!r} has sites = {cls.sites}; expected one or more of {', '.join(SITES)}."
        )
    taken = sorted(_WORDS_OF_ENTRIES & {field.name for field in fields(cls)})
    if taken:
        raise RequestError(
            f"memory type {name!r} has the option {taken[0]!r}, which says what or where a memory is; choose another name."
        )
    for tensor_name, tensor in sample_tensors(cls):
        if tensor.role not in _ROLES:
            raise RequestError(
                f"memory type {name!r} gives {tensor_name} the role {tensor.role!r}; expected one of {', '.join(_ROLES)}."
            )
        if tensor.role == "buffer" and "." in tensor_name:
            raise RequestError(
                f"memory type {name!r} gives {tensor_name} the role 'buffer'; expected a parameter: linear layers have no buffers."
            )
        if tensor.dtype and tensor.role != "buffer":
            raise RequestError(
                f"memory type {name!r} gives {tensor_name} the role {tensor.role!r} and the dtype {tensor.dtype}; expected the role "
                "'buffer', since integers do not train."
            )
