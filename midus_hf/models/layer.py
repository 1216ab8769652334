"""The decoder layer that hosts memories, at every site that there is."""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from midus_config.memory_entries import Memories, inserted_options
from midus_hf.memory.registry import MemoryModule, build_memory
from midus_hf.models.adapted import Adapter, HeadReader
from midus_hf.models.carrying import given_at, skips_into, taken_at, taken_last_at
from midus_hf.models.depth_heads import DepthHeads, DepthPass
from midus_hf.models.memory_inputs import Carried, MemoryInputs

_NOTHING = MemoryInputs()
"""What a pass brings that brings nothing: nobody writes to it, since a layer that carries something is called with its own."""


class HostLayer:
    """Mixin that turns a family's decoder layer into one that hosts memories.

    The family's layer is built first, so what it has keeps its name, its place in the cache and its class: masks, caches,
    checkpointing and output capture treat it as any other layer. Its forward is written once for all families, from the
    roles of its norms.

    A layer that was inserted for a memory is a MIDUS block, `M(x) = x + Mem(Attn'(LN(x)))` (equations 7 and 18). It loses the
    feed-forward network, every norm but the one in front of attention, and, unless the memory wants them, the output projection and
    the norm behind it. The memory's output goes straight into the residual stream: an output norm (Gemma) at its start value
    of zero would have a gradient of 1 / sqrt(eps).

    Args:
        config: Of the model.
        layer_idx: Index of the layer.
        memories: Of the model.
    """

    attention_norm: ClassVar[str | None] = "input_layernorm"
    """The norm in front of attention; None where the family has none."""
    attention_output_norm: ClassVar[str | None] = None
    """The norm behind the attention's output projection."""
    mlp_norm: ClassVar[str | None] = "post_attention_layernorm"
    """The norm in front of the feed-forward network."""
    mlp_output_norm: ClassVar[str | None] = None
    """The norm behind the feed-forward network."""
    attention_class: ClassVar[type[nn.Module]]
    mlp_class: ClassVar[type[nn.Module]]
    memories: nn.ModuleDict
    self_attn: Any

    def __init__(self, config, layer_idx: int, memories: Memories):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx
        self.is_inserted = layer_idx in memories.inserted
        self.classes: dict[str, type[MemoryModule]] = {}  # what PEFT wraps does not tell its class
        self.sites = {entry.name: entry.site for entry in memories.attached_to(layer_idx)}
        attached = memories.attached.values()
        self.skips_from = tuple(
            Carried(entry.name, read) for entry in attached for read in skips_into(entry, layer_idx)
        )
        self.takes = tuple(carried for entry in attached for carried in taken_at(entry, layer_idx))
        self.gives = tuple(carried for entry in attached for carried in given_at(entry, layer_idx))
        self.takes_last = taken_last_at(memories, layer_idx)
        self.depth: DepthHeads | None = None
        self.is_plain_block = False
        if self.is_inserted:
            self._become_block(config, memories)
        if "inside-attention" in self.sites.values():
            self.self_attn = self.attention_class(config, layer_idx)
        if "inside-ffn" in self.sites.values():
            self.mlp = self.mlp_class(config)
        if self.sites:
            self.memories = nn.ModuleDict(
                {
                    entry.name: build_memory(
                        entry.options, memories.sizes, entry.layers.index(layer_idx), len(entry.layers)
                    )
                    for entry in memories.attached_to(layer_idx)
                }
            )
            self.classes |= {name: type(memory) for name, memory in self.memories.items()}
        for entry in memories.attached_to(layer_idx):
            if entry.options.attends:
                self.depth = DepthHeads(config, entry, layer_idx)

    def _become_block(self, config, memories: Memories) -> None:
        entry = memories.inserted[self.layer_idx]
        options = inserted_options(entry)
        output_norm = self.attention_output_norm if options.keeps_output_projection else None
        self.normalises_output, self.adds_block_input = output_norm is not None, options.adds_block_input
        for name in [
            name for name, _ in self.named_children() if name not in ("self_attn", self.attention_norm, output_norm)
        ]:
            delattr(self, name)
        self.self_attn = self.attention_class(config, self.layer_idx)
        if not options.keeps_output_projection:
            self.self_attn.drop_output_projection()
        self.memory = build_memory(options, memories.sizes, entry.layers.index(self.layer_idx), len(entry.layers))
        self.classes[""] = type(self.memory)
        asks = self.memory.inputs or self.memory.asks or type(self.memory).inputs or type(self.memory).asks
        changes = self.normalises_output or self.adds_block_input or self.sites or self.takes or self.gives
        self.is_plain_block = self.attention_norm is not None and not (asks or changes)

    def __call__(
        self, hidden_states: torch.Tensor, *, memory_inputs: MemoryInputs | None = None, **kwargs: Any
    ) -> Any:
        """As `nn.Module.__call__`; what memories take of earlier layers, and give for later ones, are inputs and outputs of it.

        So nothing within a layer changes what the pass brings, and activation checkpointing, of either kind, keeps these tensors
        as it keeps hidden states.
        """
        call: Any = super().__call__
        if not (self.takes or self.gives):
            return call(hidden_states, memory_inputs=memory_inputs, **kwargs)
        assert memory_inputs is not None, "a model whose layers carry something calls them with memory_inputs"
        taken = memory_inputs.carried(self.takes)
        hidden_states, *given = call(hidden_states, *taken, memory_inputs=memory_inputs, **kwargs)
        memory_inputs.carry(self.gives, given)
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
        """Map the residual stream `[B, T, D]` to itself behind this layer.

        Args:
            hidden_states: `[B, T, D]`.
            taken: What the layer takes of earlier ones, in the order of its `takes`.
            attention_mask: As the family's layer takes it.
            position_ids: As the family's layer takes them.
            past_key_values: As the family's layer takes them.
            memory_inputs: What the pass brings to memories.
            kwargs: What the family's attention takes.

        Returns:
            `[B, T, D]`; where the layer takes or gives anything, a tuple of it and of what it gives, in the order of its `gives`.
        """
        # The general way below gives the same, but takes a twentieth of a decoding step's block longer on the host.
        if self.is_plain_block:
            attention_output, _ = self.self_attn(
                hidden_states=getattr(self, self.attention_norm)(hidden_states),
                attention_mask=attention_mask,
                position_ids=position_ids,
                past_key_values=past_key_values,
                **kwargs,
            )  # [B, T, H * d], or [B, T, D] with an output projection
            return self.memory(attention_output, hidden_states)
        memory_inputs = _NOTHING if memory_inputs is None else memory_inputs
        carried = dict(zip(self.takes, taken, strict=True))
        depth = None if self.depth is None else self.depth.begin(self, carried, kwargs.get("position_embeddings"))
        inside_attention = self._inside_attention(memory_inputs, depth) if self.sites else {}
        attention_input = self._normalised(self.attention_norm, hidden_states)
        attention_output, _ = self.self_attn(
            hidden_states=attention_input,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **inside_attention,
            **kwargs,
        )  # [B, T, D], or [B, T, H * d] without an output projection
        if self.is_inserted:
            return self._block_output(hidden_states, attention_output, memory_inputs)
        hidden_states = hidden_states + self._normalised(self.attention_output_norm, attention_output)
        hidden_states = self._with_added("behind-attention", hidden_states, hidden_states, memory_inputs)

        mlp_input = self._normalised(self.mlp_norm, hidden_states)
        adapters = self._adapters("inside-ffn", memory_inputs)
        mlp_output = self.mlp(mlp_input, adapters=adapters) if adapters else self.mlp(mlp_input)
        mlp_output = self._with_added("beside-ffn", mlp_output, mlp_input, memory_inputs)
        for name in self._at("skip", memory_inputs):
            carried[Carried(name, self.layer_idx)] = self._read(name, mlp_input, memory_inputs)
        if depth is not None:
            carried |= depth.written(attention_input, mlp_input)
        hidden_states = hidden_states + self._normalised(self.mlp_output_norm, mlp_output)
        for skip in self.skips_from:
            added = carried.get(skip)
            if added is not None:  # else the memory had nothing to do
                hidden_states = hidden_states + added.to(hidden_states.dtype)
        hidden_states = self._with_added("behind-layer", hidden_states, hidden_states, memory_inputs)
        if not (self.takes or self.gives):
            return hidden_states
        return hidden_states, *(carried.get(given) for given in self.gives)

    def _block_output(
        self, hidden_states: torch.Tensor, attention_output: torch.Tensor, memory_inputs: MemoryInputs
    ) -> torch.Tensor:
        if self.normalises_output:
            attention_output = self._normalised(self.attention_output_norm, attention_output)
        if self.adds_block_input:
            attention_output = hidden_states + attention_output
        return self.memory(attention_output, hidden_states, **self._inputs_of("", memory_inputs))

    def _normalised(self, norm: str | None, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states if norm is None else getattr(self, norm)(hidden_states)

    def _at(self, site: str, memory_inputs: MemoryInputs) -> list[str]:
        """Names of the memories of this layer at a site that have something to do in this pass."""
        at_site = (name for name, taken in self.sites.items() if taken == site)
        return [name for name in at_site if memory_inputs.are_there_for(self.classes[name], name)]

    def _read(self, name: str, hidden_states: torch.Tensor, memory_inputs: MemoryInputs) -> torch.Tensor:
        return self.memories[name](hidden_states, **self._inputs_of(name, memory_inputs))

    def _inputs_of(self, name: str, memory_inputs: MemoryInputs) -> dict[str, Any]:
        return memory_inputs.of(self.classes[name], name, self.layer_idx)

    def _with_added(
        self, site: str, hidden_states: torch.Tensor, read: torch.Tensor, memory_inputs: MemoryInputs
    ) -> torch.Tensor:
        """`hidden_states`, and what each memory at a site adds to it after reading `read`."""
        for name in self._at(site, memory_inputs):
            hidden_states = hidden_states + self._read(name, read, memory_inputs).to(hidden_states.dtype)
        return hidden_states

    def _inside_attention(self, memory_inputs: MemoryInputs, depth: DepthPass | None) -> dict[str, Any]:
        """What the memories inside attention change of it."""
        names = self._at("inside-attention", memory_inputs)
        if not names:
            return {}
        readers = [
            HeadReader(
                partial(self.memories[name], **self._inputs_of(name, memory_inputs)),
                self.classes[name].wants_unrotated,
            )
            for name in names
            if self.classes[name].reads_heads
        ]
        adapters = self._adapters("inside-attention", memory_inputs)
        return {"adapters": adapters, "readers": readers, "depth": depth}

    def _adapters(self, site: str, memory_inputs: MemoryInputs) -> dict[str, Adapter]:
        """What the memories at a site change of projections, by the role of the projection."""
        adapters: dict[str, Adapter] = {}
        for name in self._at(site, memory_inputs):
            inputs = self._inputs_of(name, memory_inputs)
            for role in self.classes[name].projections:
                adapters[role] = _after(adapters.get(role), self.memories[name], role, inputs)
        return adapters


def _after(first: Adapter | None, memory: nn.Module, role: str, inputs: Mapping[str, Any]) -> Adapter:
    """A memory's adapter of a projection, behind another memory's."""

    def adapter(read: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        given = given if first is None else first(read, given)
        return memory(read, given, projection=role, **inputs)

    return adapter
