"""Decoder layer of the base with attached memories, at any of the sites."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from midus_hf.config.installed import needed_for
from midus_hf.config.memory_entries import Memories, MemoryEntry
from midus_hf.memory.registry import build_memory
from midus_hf.models.adapted import Adapter, HeadReader, View, rotates
from midus_hf.models.depth_heads import DepthHeads, DepthPass
from midus_hf.models.memory_inputs import Carried, MemoryInputs
from midus_hf.models.parts import MissingPart, NamesParts

# Empty inputs, for a pass without inputs of memories. Never written to: a layer that carries tensors gets its own
# inputs.
_NOTHING = MemoryInputs()


class HostLayer(NamesParts):
    """Mixin that turns a family's decoder layer into a layer with attached memories.

    A layer of the family is taken over, so its parts keep their names, their place in the cache and their class: masks, caches,
    checkpointing and output capture treat the layer as any other layer. The forward is the family's own. It runs on a view of
    the layer in which memories stand at the mixer, the norm behind the mixer, or the feed-forward network, so that the forward of
    no family is repeated here, and a call leaves nothing behind on the layer.
    """

    attention_class: ClassVar[type[nn.Module] | None] = None
    mlp_class: ClassVar[type[nn.Module] | None] = None
    # Whether some layers of the type do not rotate queries and keys.
    some_do_not_rotate: ClassVar[bool] = False
    # Whether the residual stream behind the mixer is the sum of the layer's input and the mixer's output.
    adds_mixer: ClassVar[bool] = True
    memories: nn.ModuleDict
    # Tensors that the layer takes from earlier layers.
    takes: tuple[Carried, ...] = ()
    # Tensors that the layer gives to later layers.
    gives: tuple[Carried, ...] = ()
    # Tensors that no later layer takes.
    takes_last: tuple[Carried, ...] = ()
    # Results of memories at earlier layers that are added behind this layer.
    skips_from: tuple[Carried, ...] = ()
    # Whether the layer takes or gives any tensor.
    carries = False

    @classmethod
    def take_over(cls, layer: Any, config: Any, layer_idx: int, memories: Memories) -> Any:
        """Turn a layer of the family into a layer with attached memories, in place, and return the layer.

        Args:
            layer: A layer of the family, `family_class`.
            config: Config of the model.
            layer_idx: Index of the layer.
            memories: Memories of the model.

        Raises:
            MissingPart: If the layer lacks the part at which a memory is to be attached.
        """
        layer.__class__ = cls
        layer.host(config, layer_idx, memories)
        return layer

    def host(self, config: Any, layer_idx: int, memories: Memories) -> None:
        """Build the memories that are attached to the layer."""
        self.layer_idx = layer_idx
        entries = memories.attached_to(layer_idx)
        built = [
            build_memory(entry.options, memories.sizes, entry.layers.index(layer_idx), len(entry.layers))
            for entry in entries
        ]
        self.sites = {entry.name: entry.site for entry in entries}
        # Stored, since PEFT may wrap memories.
        self.classes = {entry.name: type(memory) for entry, memory in zip(entries, built, strict=True)}
        self.adapts = any(memory.projections for memory in built)
        self.reads_heads = any(memory.reads_heads for memory in built)
        for entry in entries:
            check_site(self, entry.site)
        if self.hosts("inside-attention"):
            attention = getattr(self, self.mixer_name)
            attention.__class__ = self.attention_class
            if self.some_do_not_rotate:
                attention.rotates = rotates(attention, attention.family_class)
        if self.hosts("inside-ffn"):
            getattr(self, self.feed_forward_name).__class__ = self.mlp_class
        if entries:
            self.memories = nn.ModuleDict({entry.name: memory for entry, memory in zip(entries, built, strict=True)})
        if memories.carry:
            self._carry(memories)
        self.depth: DepthHeads | None = None
        for entry in entries:
            if entry.options.attends:
                self.depth = DepthHeads(config, entry, layer_idx, self.some_do_not_rotate)

    def hosts(self, site: str) -> bool:
        """Return whether a memory is attached to the layer at a site."""
        return site in self.sites.values()

    @needed_for("carries")
    def _carry(self, memories: Memories) -> None:
        """Set which tensors the layer takes from earlier layers and gives to later layers."""
        attached = memories.attached.values()
        self.takes = tuple(carried for entry in attached for carried in taken_at(entry, self.layer_idx))
        self.gives = tuple(carried for entry in attached for carried in given_at(entry, self.layer_idx))
        self.takes_last = last_taken_at(memories, self.layer_idx)
        self.skips_from = tuple(
            Carried(entry.name, read) for entry in attached for read in skips_into(entry, self.layer_idx)
        )
        self.carries = bool(self.takes or self.gives)

    @needed_for("carries")
    def __call__(
        self, hidden_states: torch.Tensor, *args: Any, memory_inputs: MemoryInputs | None = None, **kwargs: Any
    ) -> Any:
        """Call the layer with the tensors from earlier layers as inputs, and the tensors for later layers as outputs.

        So no layer changes `memory_inputs` while it runs, and both kinds of activation checkpointing treat these tensors as they
        treat hidden states.
        """
        call: Any = super().__call__
        if not self.carries:
            return call(hidden_states, *args, memory_inputs=memory_inputs, **kwargs)
        assert memory_inputs is not None, "a model whose layers carry something calls them with memory_inputs"
        taken = memory_inputs.carried(self.takes)
        output, *for_later = call(hidden_states, *taken, *args, memory_inputs=memory_inputs, **kwargs)
        memory_inputs.carry(self.gives, for_later)
        memory_inputs.release(self.takes_last)
        return output

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, memory_inputs: MemoryInputs | None = None, **kwargs: Any
    ) -> Any:
        """Return what the family's layer returns, with the changes that memories make.

        Args:
            hidden_states: The residual stream before this layer, `[B, T, D]`.
            args: Tensors from earlier layers, in the order of `takes`, then other arguments of the family's forward.
            memory_inputs: Inputs of the pass for memories. Default: none.
            kwargs: Other arguments of the family's forward.

        Returns:
            `[B, T, D]`, or a tuple that begins with it, as the family's layer returns; if the layer takes or gives tensors, a tuple
            of this and the tensors given, in the order of `gives`.
        """
        memory_inputs = _NOTHING if memory_inputs is None else memory_inputs
        carried: dict[Carried, torch.Tensor | None] = {}
        if self.carries:
            carried = dict(zip(self.takes, args, strict=False))
            args = args[len(self.takes) :]
        depth: DepthPass | None = None
        if self.depth is not None and self._at("inside-attention", memory_inputs):
            depth = self.depth.begin(self, carried, kwargs.get("position_embeddings"))
        parts: dict[str, Any] = {}  # parts of the layer that memories stand at
        if self.hosts("inside-attention"):
            parts[self.mixer_name] = partial(self._mix, memory_inputs, depth)
        if self.hosts("behind-attention"):
            name = self.attention_output_norm or self.mixer_name
            part = parts.get(name, getattr(self, name))
            parts[name] = partial(self._add_behind_mixer, hidden_states, memory_inputs, part)
        if self.hosts("inside-ffn") or self.hosts("beside-ffn") or self.hosts("skip") or depth is not None:
            assert self.feed_forward_name is not None, "check_site has refused a layer without a feed-forward network"
            parts[self.feed_forward_name] = partial(self._feed_forward, memory_inputs, depth, carried)
        output = self.family_class.forward(View(self, parts), hidden_states, *args, **kwargs)
        if self.skips_from:
            for skip in self.skips_from:
                added = carried.get(skip)
                if added is not None:  # None if the memory had nothing to do
                    output = with_first(output, first_of(output) + added.to(hidden_states.dtype))
        if self.hosts("behind-layer"):
            stream = first_of(output)
            output = with_first(output, self._with_added("behind-layer", stream, stream, memory_inputs))
        if self.carries:
            return output, *(carried.get(key) for key in self.gives)
        return output

    @needed_for("inside_attention")
    def _mix(self, memory_inputs: MemoryInputs, depth: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        """Run the attention of the layer with the changes that memories make inside it."""
        changes: dict[str, Any] = {}
        if self.adapts:
            changes["adapters"] = self._adapters("inside-attention", memory_inputs)
        if self.reads_heads:
            changes["readers"] = self._readers(memory_inputs)
        if depth is not None:
            depth.note_input(hidden_states)
            changes["depth"] = depth
        return getattr(self, self.mixer_name)(hidden_states, **changes, **kwargs)

    @needed_for("behind_attention")
    def _add_behind_mixer(
        self, entered: torch.Tensor, memory_inputs: MemoryInputs, part: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run the last part before the mixer's output is added to the residual stream, and add what memories read from the sum."""
        output = part(*args, **kwargs)
        added = first_of(output)
        return with_first(output, self._with_added("behind-attention", added, entered + added, memory_inputs))

    @needed_for("inside_ffn", "beside_ffn", "skips", "depth")
    def _feed_forward(
        self,
        memory_inputs: MemoryInputs,
        depth: Any,
        carried: dict[Carried, torch.Tensor | None],
        hidden_states: torch.Tensor,
        *args: Any,
    ) -> Any:
        """Run the feed-forward network of the layer with the changes that memories make inside and beside it."""
        assert self.feed_forward_name is not None, "check_site has refused a layer without a feed-forward network"
        network = getattr(self, self.feed_forward_name)
        if self.hosts("inside-ffn"):
            output = network(hidden_states, *args, adapters=self._adapters("inside-ffn", memory_inputs))
        else:
            output = network(hidden_states, *args)
        if self.hosts("beside-ffn"):
            # Some networks of experts return all tokens in one dimension.
            added = self._with_added(
                "beside-ffn", first_of(output).view_as(hidden_states), hidden_states, memory_inputs
            )
            output = with_first(output, added)
        if self.hosts("skip"):
            for name in self._at("skip", memory_inputs):
                carried[Carried(name, self.layer_idx)] = self._read(name, hidden_states, memory_inputs)
        if depth is not None:
            carried |= depth.written(hidden_states)
        return output

    def _at(self, site: str, memory_inputs: MemoryInputs) -> list[str]:
        """Return the names of this layer's memories at a site that have something to do in this pass."""
        at_site = (name for name, taken in self.sites.items() if taken == site)
        return [name for name in at_site if memory_inputs.are_there_for(self.classes[name], name)]

    def _read(self, name: str, hidden_states: torch.Tensor, memory_inputs: MemoryInputs) -> torch.Tensor:
        return self.memories[name](hidden_states, **self._inputs_of(name, memory_inputs))

    def _inputs_of(self, name: str, memory_inputs: MemoryInputs) -> dict[str, Any]:
        return memory_inputs.of(self.classes[name], name, self.layer_idx)

    def _with_added(
        self, site: str, hidden_states: torch.Tensor, read: torch.Tensor, memory_inputs: MemoryInputs
    ) -> torch.Tensor:
        """Add to `hidden_states` the output of each memory at a site for the input `read`."""
        for name in self._at(site, memory_inputs):
            hidden_states = hidden_states + self._read(name, read, memory_inputs).to(hidden_states.dtype)
        return hidden_states

    def _readers(self, memory_inputs: MemoryInputs) -> list[HeadReader]:
        """Return the changes that the memories inside attention make to the output of the heads."""
        return [
            HeadReader(
                partial(self.memories[name], **self._inputs_of(name, memory_inputs)),
                self.classes[name].wants_unrotated,
            )
            for name in self._at("inside-attention", memory_inputs)
            if self.classes[name].reads_heads
        ]

    def _adapters(self, site: str, memory_inputs: MemoryInputs) -> dict[str, Adapter]:
        """Return the adapters of projections from the memories at a site, by the role of the projection."""
        adapters: dict[str, Adapter] = {}
        for name in self._at(site, memory_inputs):
            inputs = self._inputs_of(name, memory_inputs)
            for role in self.classes[name].projections:
                adapters[role] = _after(adapters.get(role), self.memories[name], role, inputs)
        return adapters


def check_site(layer: Any, site: str) -> None:
    """Check that a layer has the part at which a memory is to be attached.

    Raises:
        MissingPart: If the layer lacks the part.
    """
    mixer, network = (getattr(layer, name or "", None) for name in (layer.mixer_name, layer.feed_forward_name))
    attention, mlp = layer.attention_class, layer.mlp_class
    missing = {
        "inside-attention": attention is None or not isinstance(mixer, attention.family_class),
        "behind-attention": mixer is None or not layer.adds_mixer,
        "inside-ffn": mlp is None or not isinstance(network, mlp.family_class),
        "beside-ffn": network is None,
        "skip": network is None,
    }
    if missing.get(site):
        raise MissingPart(f"layer {layer.layer_idx} of class {layer.family_class.__name__}", site)


def first_of(output: Any) -> torch.Tensor:
    """Return the hidden states in the output of a part, which may be a tuple that begins with them."""
    return output if isinstance(output, torch.Tensor) else output[0]


def with_first(output: Any, hidden_states: torch.Tensor) -> Any:
    """Return the output of a part with other hidden states."""
    return hidden_states if isinstance(output, torch.Tensor) else (hidden_states, *output[1:])


def _after(first: Adapter | None, memory: nn.Module, role: str, inputs: Mapping[str, Any]) -> Adapter:
    """Return a memory's adapter of a projection, which runs after the adapter `first`, if there is one."""

    def adapter(read: torch.Tensor, output: torch.Tensor) -> torch.Tensor:
        output = output if first is None else first(read, output)
        return memory(read, output, projection=role, **inputs)

    return adapter


def given_at(entry: MemoryEntry, layer: int) -> tuple[Carried, ...]:
    """Return the tensors that a layer's memory gives to later layers; none if the layer does not have the memory."""
    if layer not in entry.layers:
        return ()
    index = entry.layers.index(layer)
    skips = (Carried(entry.name, layer),) if entry.into and entry.into[index] != layer else ()
    return (*skips, *(Carried(entry.name, layer, part) for part in entry.options.gives(index, len(entry.layers))))


def taken_at(entry: MemoryEntry, layer: int) -> tuple[Carried, ...]:
    """Return the tensors that a layer takes from the memory of earlier layers."""
    skips = tuple(Carried(entry.name, read) for read in skips_into(entry, layer) if read != layer)
    if layer not in entry.layers:
        return skips
    taken = entry.options.takes(entry.layers.index(layer))
    return (*skips, *(Carried(entry.name, entry.layers[index], part) for index, part in taken))


def skips_into(entry: MemoryEntry, layer: int) -> tuple[int, ...]:
    """Return the layers at which a memory reads the input for results that are added behind `layer`."""
    return tuple(read for read, into in zip(entry.layers, entry.into, strict=False) if into == layer)


def last_taken_at(memories: Memories, layer: int) -> tuple[Carried, ...]:
    """Return the tensors that a layer gives or takes, and that no later layer takes."""
    return tuple(
        carried
        for entry in memories.attached.values()
        for carried in (*taken_at(entry, layer), *given_at(entry, layer))
        if not any(carried in taken_at(entry, later) for later in range(layer + 1, memories.sizes.num_layers))
    )
