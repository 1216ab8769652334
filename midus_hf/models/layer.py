"""Decoder layer of the base with attached memories, at any of the sites."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from midus_hf.config.installed import needed_for
from midus_hf.config.memory_entries import Memories, MemoryEntry
from midus_hf.memory.registry import build_memory
from midus_hf.models.adapted import Adapter, HeadReader
from midus_hf.models.depth_heads import DepthHeads
from midus_hf.models.memory_inputs import Carried, MemoryInputs
from midus_hf.models.norms import NamesNorms

# Empty inputs, for a pass without inputs of memories. Never written to: a layer that carries tensors gets its own
# inputs.
_NOTHING = MemoryInputs()


class HostLayer(NamesNorms):
    """Mixin that turns a family's decoder layer into a layer with attached memories.

    The family's layer is built first, so its parts keep their names, their place in the cache and their class: masks, caches,
    checkpointing and output capture treat the layer as any other layer. The forward is written once for all families, from
    the roles of a layer's norms.

    Args:
        config: Config of the model.
        layer_idx: Index of the layer.
        memories: Memories of the model.
    """

    attention_class: ClassVar[type[nn.Module]]
    mlp_class: ClassVar[type[nn.Module]]
    memories: nn.ModuleDict
    self_attn: Any
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

    def __init__(self, config, layer_idx: int, memories: Memories):
        super().__init__(config, layer_idx)
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
        if self.hosts("inside-attention"):
            self.self_attn = self.attention_class(config, layer_idx)
        if self.hosts("inside-ffn"):
            self.mlp = self.mlp_class(config)
        if entries:
            self.memories = nn.ModuleDict({entry.name: memory for entry, memory in zip(entries, built, strict=True)})
        if memories.carry:
            self._carry(memories)
        self.depth: DepthHeads | None = None
        for entry in entries:
            if entry.options.attends:
                self.depth = DepthHeads(config, entry, layer_idx)

    def hosts(self, site: str) -> bool:
        """Return whether a memory is attached to the layer at a site."""
        return site in self.sites.values()

    @needed_for("carries")
    def _carry(self, memories: Memories) -> None:
        """Set which tensors the layer takes from earlier layers and gives to later layers."""
        attached = memories.attached.values()
        self.takes = tuple(carried for entry in attached for carried in taken_at(entry, self.layer_idx))
        self.gives = tuple(carried for entry in attached for carried in given_at(entry, self.layer_idx))
        self.takes_last = taken_last_at(memories, self.layer_idx)
        self.skips_from = tuple(
            Carried(entry.name, read) for entry in attached for read in skips_into(entry, self.layer_idx)
        )
        self.carries = bool(self.takes or self.gives)

    @needed_for("carries")
    def __call__(
        self, hidden_states: torch.Tensor, *, memory_inputs: MemoryInputs | None = None, **kwargs: Any
    ) -> Any:
        """Call the layer with the tensors from earlier layers as inputs, and the tensors for later layers as outputs.

        So no layer changes `memory_inputs` while it runs, and both kinds of activation checkpointing treat these tensors as they
        treat hidden states.
        """
        call: Any = super().__call__
        if not self.carries:
            return call(hidden_states, memory_inputs=memory_inputs, **kwargs)
        assert memory_inputs is not None, "a model whose layers carry something calls them with memory_inputs"
        taken = memory_inputs.carried(self.takes)
        hidden_states, *outputs = call(hidden_states, *taken, memory_inputs=memory_inputs, **kwargs)
        memory_inputs.carry(self.gives, outputs)
        memory_inputs.release(self.takes_last)
        return hidden_states

    def forward(
        self,
        hidden_states: torch.Tensor,
        *taken: torch.Tensor | None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        memory_inputs: MemoryInputs | None = None,
        **kwargs,
    ) -> Any:
        """Return the residual stream behind this layer. Arguments that are not listed here are the family layer's.

        Args:
            hidden_states: The residual stream before this layer, `[B, T, D]`.
            taken: Tensors from earlier layers, in the order of `takes`.
            memory_inputs: Inputs of the pass for memories. Default: none.
            kwargs: Other arguments of the family's attention.

        Returns:
            `[B, T, D]`; if the layer takes or gives tensors, a tuple of `[B, T, D]` and the tensors given, in the order of `gives`.
        """
        memory_inputs = _NOTHING if memory_inputs is None else memory_inputs
        if self.carries or self.skips_from:
            carried = dict(zip(self.takes, taken, strict=True))
        if self.depth is not None:
            depth = self.depth.begin(self, carried, kwargs.get("position_embeddings"))
        attention_input = self.normalised(self.attention_norm, hidden_states)
        changes: dict[str, Any] = {}  # arguments of attention
        if self.adapts and self.hosts("inside-attention"):
            changes["adapters"] = self._adapters("inside-attention", memory_inputs)
        if self.reads_heads:
            changes["readers"] = self._readers(memory_inputs)
        if self.depth is not None and self._at("inside-attention", memory_inputs):
            changes["depth"] = depth
        attention_output, _ = self.self_attn(
            hidden_states=attention_input,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **changes,
            **kwargs,
        )  # [B, T, D]
        hidden_states = hidden_states + self.normalised(self.attention_output_norm, attention_output)
        if self.hosts("behind-attention"):
            hidden_states = self._with_added("behind-attention", hidden_states, hidden_states, memory_inputs)

        mlp_input = self.normalised(self.mlp_norm, hidden_states)
        if self.hosts("inside-ffn"):
            mlp_output = self.mlp(mlp_input, adapters=self._adapters("inside-ffn", memory_inputs))
        else:
            mlp_output = self.mlp(mlp_input)
        if self.hosts("beside-ffn"):
            mlp_output = self._with_added("beside-ffn", mlp_output, mlp_input, memory_inputs)
        if self.hosts("skip"):
            for name in self._at("skip", memory_inputs):
                carried[Carried(name, self.layer_idx)] = self._read(name, mlp_input, memory_inputs)
        if self.depth is not None:
            carried |= depth.written(attention_input, mlp_input)
        hidden_states = hidden_states + self.normalised(self.mlp_output_norm, mlp_output)
        if self.skips_from:
            for skip in self.skips_from:
                added = carried.get(skip)
                if added is not None:  # None if the memory had nothing to do
                    hidden_states = hidden_states + added.to(hidden_states.dtype)
        if self.hosts("behind-layer"):
            hidden_states = self._with_added("behind-layer", hidden_states, hidden_states, memory_inputs)
        if self.carries:
            return hidden_states, *(carried.get(key) for key in self.gives)
        return hidden_states

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


def taken_last_at(memories: Memories, layer: int) -> tuple[Carried, ...]:
    """Return the tensors that a layer gives or takes, and that no later layer takes."""
    return tuple(
        carried
        for entry in memories.attached.values()
        for carried in (*taken_at(entry, layer), *given_at(entry, layer))
        if not any(carried in taken_at(entry, later) for later in range(layer + 1, memories.sizes.num_layers))
    )
