"""Base class of all memory layers, and modules with declared tensors.

A memory's layer is a subclass of `MemoryModule` under the decorator `register_layer`; the base class makes the tensors that the
memory's options declare. A layer must read its tensors in its `forward`, as hooks of offloading and sharding require. The arguments
and the result of `forward` depend on the memory's site:

- `inserted`: `forward(attention_output, residual)` takes the attention output `[B, T, W]` and the residual stream `[B, T, D]`,
  and returns the residual stream with the retrieved values added.
- `inside-ffn`, `inside-attention`: `forward(read, output, projection=role)` is called for each of its `projections` with the
  projection's input and output, and returns the output to use instead.
- `inside-attention`, by the site `AttentionHeads`: `forward(query, key, value, output)` takes queries `[B, H, T, d]`, keys and values
  `[B, K, S, d]`, rotated and from the cache, and the output of the heads `[B, T, H, d]`; it returns the output to use instead.
- any other site: `forward(hidden_states)` takes `[B, T, D]`, the memory's input, and returns what is added, `[B, T, D]`.

`forward` also takes, by keyword, its `forward_arguments` that the model was called with, and what its `services` give.
"""

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch import nn

from midus_hf.config.declared_tensors import DeclaredTensor, ModelSizes, Role
from midus_hf.config.errors import RequestError
from midus_hf.memories.options import MemoryOptions, package_only
from midus_hf.memories.registry import layer_class


class DeclaredModule(nn.Module):
    """Module with declared tensors: parameters, buffers, and a linear layer `NAME` for `NAME.weight`."""

    def __init__(self, declared: Mapping[str, DeclaredTensor]):
        super().__init__()
        self.declared = dict(declared)
        for name, tensor in self.declared.items():
            if name.endswith(".weight"):
                outputs, inputs = tensor.shape
                # Unlike `setattr`, this refuses names of what a module has already.
                self.add_module(name.removesuffix(".weight"), nn.Linear(inputs, outputs, bias=False))
            elif tensor.role == "buffer":
                dtype = getattr(torch, tensor.dtype) if tensor.dtype else None
                self.register_buffer(name, torch.empty(tensor.shape, dtype=dtype))
            else:
                setattr(self, name, nn.Parameter(torch.empty(tensor.shape)))
        self.reset_parameters()

    def leave_out(self, name: str) -> None:
        """Remove a declared tensor from the module."""
        del self.declared[name]
        delattr(self, name.removesuffix(".weight"))

    def declared_tensor(self, name: str) -> torch.Tensor:
        """Return a parameter or buffer by its declared name."""
        return attrgetter(name)(self)

    def reset_parameters(self) -> None:
        """Initialise every parameter and buffer that no checkpoint has filled, except on the meta device."""
        for name, tensor in (*self.named_parameters(), *self.named_buffers()):
            if not (tensor.is_meta or getattr(tensor, "_is_hf_initialized", False)):
                with torch.no_grad():
                    self.declared[name].initial.fill(tensor)


def tensor_names(module: DeclaredModule, *roles: Role) -> list[str]:
    """Return the names of a module's tensors that have one of the roles."""
    return [name for name, tensor in module.declared.items() if tensor.role in roles]


class MemoryTables(DeclaredModule):
    """Tables that several layers read. The model holds them, so they are saved, counted and sharded once."""

    def forward(self) -> dict[str, torch.Tensor]:
        """Return the tables by name, so that the hooks of offloading and sharding run first."""
        return {name: self.declared_tensor(name) for name in self.declared}


class MemoryModule(DeclaredModule):
    """A memory layer, by the options of its type and the model's sizes; a `RequestError` if they do not fit."""

    #: Classes of the sites at which the memory can be attached (`midus_hf.memories.hosting.sites`); none for an inserted memory.
    sites: ClassVar[tuple[Any, ...]] = ()
    #: Classes of the services that the memory needs from the model (`midus_hf.memories.hosting.service`). Options may omit some.
    services: tuple[Any, ...] = ()
    #: Keyword arguments of the model's forward that the memory takes. With `input_ids` `[B, T]`, `inputs_embeds` need `token_ids`.
    forward_arguments: tuple[str, ...] = ()
    #: Roles of projections whose outputs the memory changes: `query`, `key`, `value`, `output_projection`, `gate`, `up`, `down`.
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

    @package_only
    @classmethod
    def needed_services(cls, options: Any) -> tuple[Any, ...]:
        """Return the services that a memory of these options needs. Default: all of the class."""
        return cls.services

    @classmethod
    def check_attention(cls, implementation: str | None) -> None:
        """Refuse an implementation of attention, by name; None lets Transformers choose. Default: none."""

    @package_only
    def make_decode_cache(self) -> Any:
        """Return a `DecodeCache` for tensors derived from weights. Default: None, nothing is cached."""
        return None

    @package_only
    def extra_repr(self) -> str:
        """Return the options that differ from their defaults."""
        usual = type(self.options)()
        chosen = {name: value for name, value in vars(self.options).items() if value != getattr(usual, name)}
        return ", ".join(f"{name}={value}" for name, value in chosen.items())


def build_memory(
    options: MemoryOptions, sizes: ModelSizes, index: int = 0, count: int = 1, attention: str | None = None
) -> MemoryModule:
    """Build a layer of a memory, by default the only one and not vLLM's, or raise a `RequestError`."""
    memory = layer_class(options, attention)(options, sizes)
    memory.index = index
    for name in memory.declared.keys() - options.tensors_at(sizes, index, count).keys():
        memory.leave_out(name)
    check_layer(memory, sizes, count)
    return memory


def check_layer(memory: MemoryModule, sizes: ModelSizes, count: int) -> None:
    """Refuse the layer of a memory in `count` layers that does not match what its options declare."""
    options, of_class = memory.options, type(memory).__name__
    tensors = dict([*memory.named_parameters(), *memory.named_buffers()])
    undeclared = [name for name in tensors if name not in memory.declared]
    if undeclared:
        raise RequestError(
            f"the layer of memory type {options.type!r} has a tensor {undeclared[0]!r}, which "
            f"{type(options).__name__}.tensors leaves out; expected tensors that are declared. Declare it there."
        )
    needed = {
        "Tables": bool(options.tables(sizes, tuple(range(count)))),
        "WholeSequences": options.reads_ahead,
        "ScaledInitialisation": options.scales_initialisation,
    }
    own = {service.__name__ for service in memory.services}
    sites = {"inserted", *(site.name for site in memory.sites)}
    missing = [("sites", site) for site in options.sites if site not in sites]
    missing += [("services", name) for name, is_needed in needed.items() if is_needed and name not in own]
    if missing:
        kind, name = missing[0]
        raise RequestError(
            f"memory type {options.type!r} needs {name}, which {of_class}.{kind} leaves out; expected its class of "
            f"midus_hf.memories.hosting.{kind} there."
        )


def random_directions(vectors: torch.Tensor) -> torch.Tensor:
    """Return random directions with the lengths, shape and dtype of `vectors` `[..., d]`; no gradients."""
    wide = vectors.detach().to(torch.promote_types(vectors.dtype, torch.float32))
    drawn = torch.randn_like(wide)  # from the device's generator, whose state activation checkpointing restores
    lengths, drawn_lengths = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in (wide, drawn))
    return (drawn * (lengths / drawn_lengths.clamp_min(torch.finfo(wide.dtype).tiny))).to(vectors.dtype)
