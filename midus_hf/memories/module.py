"""Base class of all memory layers.

The layer of a memory is a subclass of `MemoryModule` under the decorator `register_layer`; the base class makes the tensors that the
memory's options declare. A layer must read its tensors in its `forward`, as the hooks of offloading and sharding require. The
arguments and the result of `forward` depend on the memory's site:

- `inserted`: `forward(attention_output, residual)` takes the attention output `[B, T, W]` and the residual stream `[B, T, D]`,
  and returns the residual stream with the retrieved values added.
- `inside-ffn`, `inside-attention`: `forward(read, output, projection=role)` is called for each of its `projections` with the
  projection's input and output, and returns the output to use instead.
- `inside-attention`, by the site `AttentionHeads`: `forward(query, key, value, output)` takes queries `[B, H, T, d]`, keys and values
  `[B, K, S, d]`, rotated and from the cache, and the output of the heads `[B, T, H, d]`; it returns the output to use instead.
- any other site: `forward(hidden_states)` takes `[B, T, D]`, the memory's input, and returns what is added, `[B, T, D]`.

`forward` also takes, by keyword, each of the memory's `forward_arguments` that the model was called with, and what its `services`
give.
"""

from typing import Any, ClassVar

import torch

from midus_hf.config.errors import RequestError
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.options import MemoryOptions
from midus_hf.memories.registry import layer_class
from midus_hf.memories.tables import DeclaredModule


class MemoryModule(DeclaredModule):
    """A memory layer: its keys and values, and the retrieval of values for hidden states.

    Args:
        options: Options of the memory's type.
        sizes: Sizes of the model.

    Raises:
        RequestError: If the memory does not fit the model.
    """

    #: Classes of the sites at which the memory can be attached (`midus_hf.memories.hosting.sites`); none for an inserted memory.
    sites: ClassVar[tuple[Any, ...]] = ()
    #: Classes of the services that the memory needs from the model (`midus_hf.memories.hosting.service`). Options may omit some.
    services: tuple[Any, ...] = ()
    #: Names of keyword arguments of the model's forward pass that the memory takes. A memory that takes `input_ids` `[B, T]` always
    #: gets them: passes with `inputs_embeds` then also need `token_ids`.
    forward_arguments: tuple[str, ...] = ()
    #: Roles of the projections whose output a memory inside attention or a feed-forward network changes: `query`,
    #: `key`, `value`, `output_projection`, `gate`, `up`, `down`.
    projections: ClassVar[tuple[str, ...]] = ()
    #: Whether a memory at the site `AttentionHeads` also takes queries `[B, H, T, d]` without their rotation, as `unrotated`.
    wants_unrotated: ClassVar[bool] = False
    #: Whether a memory with a state can roll back the last tokens of a sequence, as in assisted decoding.
    is_croppable: bool = True
    #: Function that rolls the last tokens back in a state's tensors. Default: None, the tensors do not depend on these tokens.
    rollback: ClassVar["staticmethod[[dict[str, torch.Tensor], int], dict[str, torch.Tensor] | None] | None"] = None
    #: Index of the memory's layer among the layers that have the memory, from 0; set by the host.
    index: int = 0
    #: Tensors derived from weights, during a generation (`midus_hf.memories.decode_cache`). Default: None.
    decode_cache: Any = None

    def __init__(self, options: Any, sizes: ModelSizes):
        options.check_fit(sizes)
        super().__init__(options.tensors(sizes))
        self.options: Any = options

    @classmethod
    def check_attention(cls, implementation: str | None) -> None:
        """Refuse an implementation of attention with which the memory does not work. Default: the memory works with any.

        Args:
            implementation: Name of the implementation; None lets Transformers choose.

        Raises:
            RequestError: If the memory does not work with the implementation.
        """

    def extra_repr(self) -> str:
        """Return the options that differ from their defaults."""
        usual = type(self.options)()
        chosen = {name: value for name, value in vars(self.options).items() if value != getattr(usual, name)}
        return ", ".join(f"{name}={value}" for name, value in chosen.items())


def build_memory(
    options: MemoryOptions, sizes: ModelSizes, index: int = 0, count: int = 1, attention: str | None = None
) -> MemoryModule:
    """Build the layer of a memory.

    Args:
        options: Options of the memory.
        sizes: Sizes of the model.
        index: Index of the layer among the layers that have the memory. Default: 0.
        count: Number of layers that have the memory. Default: 1.
        attention: The implementation of attention of the model. Default: any but vLLM's.

    Raises:
        RequestError: If the type has no layer, or `check_layer` refuses it.
    """
    memory = layer_class(options, attention)(options, sizes)
    memory.index = index
    for name in memory.declared.keys() - options.tensors_at(sizes, index, count).keys():
        memory.leave_out(name)
    check_layer(memory, sizes, count)
    return memory


def check_layer(memory: MemoryModule, sizes: ModelSizes, count: int) -> None:
    """Refuse a layer that does not fit its options.

    Args:
        memory: The layer.
        sizes: Sizes of the model.
        count: Number of layers that have the memory.

    Raises:
        RequestError: If the layer has tensors that the options do not declare, or lacks a site or a service that they need.
    """
    options = memory.options
    undeclared = [
        name for name in dict([*memory.named_parameters(), *memory.named_buffers()]) if name not in memory.declared
    ]
    if undeclared:
        raise RequestError(
            f"the layer of memory type {options.type!r} has a tensor {undeclared[0]!r}, which "
            f"{type(options).__name__}.tensors leaves out; expected tensors that are declared. Declare it there."
        )
    named = {site.name for site in memory.sites}
    missing = [site for site in options.sites if site not in (*named, "inserted")]
    if missing:
        raise RequestError(
            f"memory type {options.type!r} has the site {missing[0]!r}, which {type(memory).__name__}.sites leaves out; expected its "
            "class of midus_hf.memories.hosting.sites there."
        )
    own = {service.__name__ for service in memory.services}
    needed = {
        "Tables": bool(options.tables(sizes, tuple(range(count)))),
        "WholeSequences": options.reads_ahead,
        "ScaledInitialisation": options.scales_initialisation,
    }
    for service, is_needed in needed.items():
        if is_needed and service not in own:
            raise RequestError(
                f"memory type {options.type!r} needs the service {service}, which {type(memory).__name__}.services leaves out; "
                f"expected midus_hf.memories.hosting.service.{service} there."
            )
