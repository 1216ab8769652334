"""Layers that host memories: the base's, by sites where memories act in it, and inserted ones."""

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from midus_hf.config.errors import RequestError
from midus_hf.memories.hosting.parts import (
    Arguments,
    CarriedKey,
    Keywords,
    LayerNames,
    MemoryInputs,
    MissingPartError,
    PartOutput,
    carried_inputs,
    carried_outputs,
    projection_name,
    stacked_rows,
)
from midus_hf.memories.module import MemoryModule, build_memory
from midus_hf.memories.options import InsertedOptions
from midus_hf.memories.registry import Memories, MemoryEntry, layer_class


@dataclasses.dataclass
class LayerCall:
    """One call of a layer with attached memories, which hooks on the layer's parts read."""

    layer_input: torch.Tensor  # [B, T, D]
    memory_inputs: MemoryInputs
    carried: dict[CarriedKey, torch.Tensor | None]
    rotation: Any  # cosines and sines of the pass at this layer, or None
    # Noted by sites that need them: the input of attention, `[B, T, D]`, and its own keys and values, `[B, K, T, d]`.
    attention_input: torch.Tensor | None = None
    own_heads: tuple[torch.Tensor, torch.Tensor] | None = None


class LayerCalls(threading.local):
    """The current call of a layer, by thread; a copy of the layer begins without one."""

    current: LayerCall | None = None

    def __reduce__(self) -> tuple:
        return type(self), ()


# For a pass without inputs of memories. Never written to: where layers carry tensors, a pass has inputs.
_NO_INPUTS = MemoryInputs()


class HostLayer(LayerNames):
    """Mixin that turns a family's decoder layer into a layer with memories at its sites.

    The layer keeps its parts' names and class, so masks, caches, checkpointing and output capture treat it as any other. The
    forward is the family's own; memories act in it by hooks on its parts (`Site`), which read what the forward sets for the length
    of the call: checkpointing reruns only this forward.
    """

    attention_class: ClassVar[type[nn.Module] | None] = None
    mlp_class: ClassVar[type[nn.Module] | None] = None
    stacked: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    some_do_not_rotate: ClassVar[bool] = False
    adds_mixer: ClassVar[bool] = True

    calls: LayerCalls
    layer_inputs: tuple[CarriedKey, ...] = ()
    layer_outputs: tuple[CarriedKey, ...] = ()
    memories: nn.ModuleDict
    layer_idx: int
    # The name of each memory's site by the memory's name, looked up in every pass: a memory taken out of this is skipped.
    sites: dict[str, str]
    # An object for each site at this layer, with its hooks; it asks `sites` for the memories that are there.
    site_objects: list["Site"]
    classes: dict[str, type[MemoryModule]]  # stored, since PEFT may wrap memories

    def host(self, config: PreTrainedConfig, layer_idx: int, memories: Memories) -> None:
        """Build the memories attached to a layer of the family, or raise a `MissingPartError`."""
        self.layer_idx, self.calls = layer_idx, LayerCalls()
        entries, sizes = memories.attached_to(layer_idx), memories.sizes.at(layer_idx)
        attention = config._attn_implementation
        built = {
            each.name: build_memory(each.options, sizes, each.layers.index(layer_idx), len(each.layers), attention)
            for each in entries
        }
        self.sites = {entry.name: entry.site for entry in entries}
        self.classes = {name: type(memory) for name, memory in built.items()}
        attached = memories.attached.values()
        self.layer_inputs = tuple(carried for entry in attached for carried in carried_inputs(entry, layer_idx))
        self.layer_outputs = tuple(carried for entry in attached for carried in carried_outputs(entry, layer_idx))
        sites = [site for entry in attached for site in sites_of(entry) if site.concerns(entry, layer_idx)]
        # After the layer, memories read what all others add.
        sites = sorted(dict.fromkeys(sites), key=lambda site: site.name == "behind-layer")
        for site in sites:
            if site.is_missing(self):
                raise MissingPartError(f"layer {layer_idx} of class {self.family_class.__name__}", site.name)
        if built:
            self.memories = nn.ModuleDict(built)
        self.site_objects = [site(self, config, memories) for site in sites]
        for each in self.site_objects:
            each.attach()  # now, since a compiled forward would have to register hooks while it is traced

    def __call__(
        self, hidden_states: torch.Tensor, *args: object, memory_inputs: MemoryInputs | None = None, **kwargs: object
    ) -> PartOutput:
        """Carry tensors of other layers as inputs and outputs: checkpointing treats them as hidden states."""
        call = super().__call__
        if not self.layer_inputs and not self.layer_outputs:
            return call(hidden_states, *args, memory_inputs=memory_inputs, **kwargs)
        assert memory_inputs is not None, "a model whose layers carry something calls them with memory_inputs"
        taken = [memory_inputs.carried[key] for key in self.layer_inputs]
        output, *for_later = call(hidden_states, *taken, *args, memory_inputs=memory_inputs, **kwargs)
        memory_inputs.carried.update(zip(self.layer_outputs, for_later, strict=True))
        return output

    @property
    def call(self) -> LayerCall:
        """The call of the forward that runs now in this thread; a `RequestError` if none does."""
        call = self.calls.current
        if call is None:
            raise RequestError(
                f"a part of layer {self.layer_idx} was called outside of the layer's forward, whose inputs its memories read; "
                "expected a call of the layer. Call the layer, or the part of the base's layer."
            )
        return call

    @property
    def mixer_part(self) -> Any:
        """The child that mixes tokens; None if no child is known to."""
        return getattr(self, self.mixer_name, None)

    @property
    def feed_forward_part(self) -> nn.Module | None:
        """The feed-forward network; None if the layer has none."""
        return getattr(self, self.feed_forward_name or "", None)

    def projection(self, part_name: str, role: str) -> tuple[str, tuple[tuple[str, int], ...]]:
        """Return the name of the module with a role's projection, and roles and rows of stacked projections."""
        part = getattr(self, part_name)
        for path, roles in self.stacked.items():
            part_class, name = path.split(".")
            if role in roles and type(part).__name__ == part_class:
                last = projection_name(part, "output_projection" if "query" in roles else "down")
                return name, stacked_rows(getattr(part, name), getattr(part, last), roles)
        return projection_name(part, role), ((role, 0),)

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, memory_inputs: MemoryInputs | None = None, **kwargs: Any
    ) -> PartOutput:
        """Return what the family's layer returns for `hidden_states` `[B, T, D]`, with the changes that memories make.

        `args` begin with the tensors of `layer_inputs`; a layer with these or `layer_outputs` returns a tuple of its output and the
        tensors for later layers.
        """
        for site in self.site_objects:
            site.attach()
        inputs = _NO_INPUTS if memory_inputs is None else memory_inputs
        carried: dict[CarriedKey, torch.Tensor | None] = dict(zip(self.layer_inputs, args, strict=False))
        before = self.calls.current
        self.calls.current = LayerCall(hidden_states, inputs, carried, kwargs.get("position_embeddings"))
        try:
            output = super().forward(hidden_states, *args[len(self.layer_inputs) :], **kwargs)
            for site in self.site_objects:
                output = site.behind(output)
        finally:
            self.calls.current = before
        for_later = tuple(carried.get(key) for key in self.layer_outputs)
        return (output, *for_later) if self.layer_inputs or for_later else output

    def at(self, site: str, memory_inputs: MemoryInputs) -> list[str]:
        """Return the names of this layer's memories at a site that have something to do in this pass."""
        at_site = (name for name, taken in self.sites.items() if taken == site)
        return [name for name in at_site if memory_inputs.is_complete_for(self.classes[name], name)]

    def read(self, name: str, hidden_states: torch.Tensor, memory_inputs: MemoryInputs) -> torch.Tensor:
        """Return the output of a memory, `[B, T, D]`, for the input `hidden_states`, `[B, T, D]`."""
        return self.memories[name](hidden_states, **self.inputs_of(name, memory_inputs))

    def inputs_of(self, name: str, memory_inputs: MemoryInputs) -> Keywords:
        """Return the keyword arguments of a memory."""
        return memory_inputs.arguments_for(self.classes[name], name, self.layer_idx)

    def with_added(
        self, site: str, hidden_states: torch.Tensor, read: torch.Tensor, memory_inputs: MemoryInputs
    ) -> torch.Tensor:
        """Return `hidden_states` plus the output of each memory at a site for the input `read`."""
        for name in self.at(site, memory_inputs):
            hidden_states = hidden_states + self.read(name, read, memory_inputs).to(hidden_states.dtype)
        return hidden_states


class CopiedLock:
    """A lock, `held`, that can be pickled and copied: the copy is another lock."""

    def __init__(self) -> None:
        self.held = threading.Lock()

    def __reduce__(self) -> tuple:
        return type(self), ()


# Held while hooks are registered, since two threads may find the same part without them.
_REGISTERING = CopiedLock()


class Site:
    """Memories at a site of one layer, which change what its parts compute; hooks read `layer.call`."""

    #: The site, as entries of a config name it.
    name: ClassVar[str]

    def __init__(self, layer: "HostLayer", config: PreTrainedConfig, memories: Memories):
        self.layer = layer
        # For the path of each part in the layer, the hook, and whether it runs before the part.
        self._hooks: dict[str, tuple[Callable[..., Any], bool]] = {}
        self._hooked: dict[str, nn.Module] = {}  # the module that was last seen at each path

    @staticmethod
    def concerns(entry: MemoryEntry, layer: int) -> bool:
        """Return whether a layer has the site for a memory. Default: the layers that have the memory do."""
        return layer in entry.layers

    @staticmethod
    def is_missing(layer: "HostLayer") -> bool:
        """Return whether a layer lacks the part at which memories are to be attached. Default: false."""
        return False

    def hook(self, path: str, hook: Callable[..., Any], *, before: bool = False) -> None:
        """Run a hook, which gets keyword arguments too, after or before the part of the layer at a path."""
        self._hooks[path] = hook, before

    def attach(self) -> None:
        """Register each hook, unless the module at its path, or one that it wraps, has it."""
        for path, (hook, before) in self._hooks.items():
            part: nn.Module = self.layer
            for name in path.split("."):
                part = getattr(part, name)
            if part is self._hooked.get(path):
                continue
            table = "_forward_pre_hooks" if before else "_forward_hooks"
            with _REGISTERING.held:
                if not any(hook in getattr(module, table).values() for module in part.modules()):
                    register = part.register_forward_pre_hook if before else part.register_forward_hook
                    register(hook, with_kwargs=True)
                self._hooked[path] = part

    def behind(self, output: PartOutput) -> PartOutput:
        """Return the output of the layer with what memories add after it."""
        return output

    def __deepcopy__(self, memo: dict[int, object]) -> "Site":
        """Return a copy for a copy of the layer; a copied part, as PEFT makes it, keeps this layer."""
        if id(self.layer) not in memo:
            return self
        copied = memo[id(self)] = object.__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied


def get_hidden_states(output: PartOutput) -> torch.Tensor:
    """Return the hidden states in the output of a part, which may be a tuple that begins with them."""
    return output if isinstance(output, torch.Tensor) else output[0]


def with_first(output: PartOutput, hidden_states: torch.Tensor) -> PartOutput:
    """Return the output of a part with other hidden states."""
    return hidden_states if isinstance(output, torch.Tensor) else (hidden_states, *output[1:])


def hidden_states_argument(args: Arguments, kwargs: Keywords) -> torch.Tensor:
    """Return the hidden states that a part was called with."""
    return args[0] if args else kwargs["hidden_states"]


def sites_of(entry: MemoryEntry) -> list[type[Site]]:
    """Return the classes of the sites at which a memory is attached."""
    return [site for site in layer_class(entry.options).sites if site.name == entry.site]


@contextlib.contextmanager
def without_memories(layers: Iterable[Any], names: Collection[str]) -> Iterator[None]:
    """Let layers, also some without memories, skip attached memories by name within the context."""
    hosts = [layer for layer in layers if hasattr(layer, "sites")]
    before = [layer.sites for layer in hosts]
    for layer in hosts:
        layer.sites = {name: site for name, site in layer.sites.items() if name not in names}
    try:
        yield
    finally:
        for layer, sites in zip(hosts, before, strict=True):
            layer.sites = sites


class MemoryBlock(LayerNames):
    """Mixin for a MIDUS block, `M(x) = x + Mem(Attn'(LN(x)))` (equations 7 and 18), of a family's layer.

    The block drops the layer's feed-forward network, every norm except the one before attention, and, unless the memory wants them,
    attention's output projection and output norm. The memory's output is added directly to the residual stream: an output norm
    (Gemma) would give a zero output a gradient of 1 / sqrt(eps).
    """

    block_attention: ClassVar[type[nn.Module] | None] = None

    def host(self, config: PreTrainedConfig, layer_idx: int, memories: Memories) -> None:
        """Drop what the block does not need, and build its memory; a `MissingPartError` without known heads."""
        self.layer_idx, entry = layer_idx, memories.inserted[layer_idx]
        options = entry.options
        assert isinstance(options, InsertedOptions)
        self.attention_name, self.adds_block_input = self.mixer_name, options.inner_residual
        self.output_norm = self.attention_output_norm if options.output_projection else None
        kept = self.attention_name, self.attention_norm, self.output_norm
        for name in [name for name, _ in self.named_children() if name not in kept]:
            delattr(self, name)
        for name in [*self._parameters, *self._buffers]:  # such as Gemma 4's factor of a layer's output
            delattr(self, name)
        if self.block_attention is None or not isinstance(getattr(self, self.attention_name), self.block_attention):
            raise MissingPartError(f"layer {layer_idx} of class {self.family_class.__name__}", "inserted")
        if not options.output_projection:  # attention then returns the heads' outputs side by side
            attention = getattr(self, self.attention_name)
            name = projection_name(attention, "output_projection")
            delattr(attention, name)
            setattr(attention, name, _NoProjection())
        sizes = memories.sizes.at(layer_idx)
        self.memory = build_memory(options, sizes, entry.layers.index(layer_idx), len(entry.layers))
        self.memory_class = type(self.memory)  # stored, since PEFT may wrap the memory
        self.takes_inputs = bool(self.memory.forward_arguments or self.memory.services)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: object,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        memory_inputs: MemoryInputs | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Return the residual stream `[B, T, D]` after this layer. Arguments are the family layer's.

        `args` are inputs of parts that the block dropped, such as the per-layer embeddings of Gemma 4; not used.
        """
        norm = None if self.attention_norm is None else getattr(self, self.attention_norm)
        read = hidden_states if norm is None else norm(hidden_states)
        # [B, T, H * d], or [B, T, D] with an output projection.
        attention_output, _ = getattr(self, self.attention_name)(
            hidden_states=read, attention_mask=attention_mask, position_ids=position_ids, **kwargs
        )
        if self.output_norm is not None:
            attention_output = getattr(self, self.output_norm)(attention_output)
        if self.adds_block_input:
            attention_output = hidden_states + attention_output
        inputs: Keywords = {}
        if self.takes_inputs and memory_inputs is not None:
            inputs = memory_inputs.arguments_for(self.memory_class, "", self.layer_idx)
        return self.memory(attention_output, hidden_states, **inputs)


class _NoProjection:
    """Stand-in for a removed projection, no module: PEFT would find one for a LoRA on every `o_proj`."""

    def __init__(self) -> None:
        self.weight = torch.empty(0)  # some families draw the weight themselves, from a normal distribution

    def __call__(self, heads_output: torch.Tensor, *_: object) -> torch.Tensor:
        return heads_output
